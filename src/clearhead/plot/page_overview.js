// ---- all heads ------------------------------------------------------------------------------------------------------

import { arranged, isByLayer } from "./page_arrange.js";
import { brief, changes, colors, drawScale, fill, readableOn, weightTicks } from "./page_color.js";
import { describeChange } from "./page_compared.js";
import { byId, data, element, say } from "./page_data.js";
import { looksAt } from "./page_finding.js";
import { leavesOutSpecial } from "./page_grids.js";
import { drawNumberScale, numberRange, paintHead, scaleCaption, valueOf, valueText } from "./page_numbers.js";
import { drawPictureScale, drawPictureThumbnail } from "./page_picture.js";
import { columnCount, isSigned, patchesOf, scaleEnds, state, toldStatistic } from "./page_state.js";
import { printed } from "./page_theme.js";

const THUMBNAIL = 56;
const MANY = 16; // heads in a row, beyond which the overview takes more of the page
const SLICE = 12; // milliseconds of drawing, after which the browser may answer
export const overview = { columns: 0, rows: [], buttons: new Map(), places: new Map(), turn: 0 };

/** One line of elements per row, and one canvas below its buttons. */
function buildOverview() {
  const rows = arranged();
  const columns = Math.max(...rows.map(({ heads }) => heads.length));
  overview.columns = columns;
  overview.buttons.clear();
  overview.places.clear();
  overview.rows = rows.map(buildRow);
  const header = state.order === "kinds" ? [] : [isByLayer() ? buildHeader(columns) : buildRankHeader()];
  byId("overview").replaceChildren(...header, ...overview.rows.map(({ line }) => line));
}

/** Thumbnails and numbers need different widths. */
function sizeOverview() {
  const { columns } = overview;
  const isWide = columns > MANY;
  const slot = state.statistic === "maps" ? (isWide ? 24 : 22) : 34;
  byId("overview").style.setProperty("--columns", columns);
  byId("overview").style.setProperty("--slot", slot + "px");
  const main = document.querySelector("main");
  main.classList.toggle("wide", isWide);
  main.style.setProperty("--overview-width", `calc(3.5rem + ${columns * slot}px)`);
  byId("overview").classList.toggle("numbers", state.statistic !== "maps");
  for (const [place, button] of overview.buttons) button.setAttribute("aria-label", describe(...place.split("-").map(Number)));
}

function buildLine(kind = "") {
  const line = document.createElement("div");
  line.className = "row " + kind;
  line.setAttribute("role", "row");
  return line;
}

function buildHeader(columns) {
  const header = buildLine();
  const { heads } = data.sections[state.section].layers[0];
  header.append(named("cell", ""));
  for (let place = 0; place < columns; place++) header.append(named("columnheader", String(heads[place] ?? place)));
  return header;
}

function buildRankHeader() {
  const header = buildLine();
  header.append(named("columnheader", say`rank`));
  return header;
}

function named(role, text) {
  const name = element("div", text, "name");
  name.setAttribute("role", role);
  return name;
}

function buildRow({ name, title, heading, heads }, at) {
  const line = buildLine(heading ? "heading" : "");
  line.append(named("rowheader", heading ?? name));
  if (heading) return { line, heads, heading };
  line.firstChild.title = title;
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "presentation");
  heads.forEach(([layer, head], column) => {
    line.append(buildThumbnail(layer, head));
    overview.places.set(layer + "-" + head, [at, column]);
  });
  line.append(canvas);
  return { line, heads, canvas };
}

function buildThumbnail(layer, head) {
  const cell = document.createElement("div");
  cell.setAttribute("role", "gridcell");
  const button = document.createElement("button");
  button.type = "button";
  button.tabIndex = -1;
  button.setAttribute("aria-pressed", "false");
  button.dataset.place = layer + "-" + head;
  overview.buttons.set(button.dataset.place, button);
  cell.append(button);
  return cell;
}

function describe(layer, head) {
  const { label, heads } = data.sections[state.section].layers[layer];
  if (isSigned()) return describeChange(layer, head);
  const { numbers, kinds } = state.item.sections[state.section].layers[layer];
  const entropy = numbers.entropy ? say`mean entropy ${brief(numbers.entropy[head])} nats; ` : "";
  const told = toldStatistic();
  const shown = told ? `; ${told} ${valueText(layer, head, told)}` : "";
  return say`Layer ${label}, head ${heads[head]}: ${entropy}${looksAt(kinds[head])}${shown}`;
}

export function tell(layer, head) {
  byId("about").textContent = describe(layer, head);
}

/** Build and draw the overview, after its statistic or its order has changed. */
export function showOverview() {
  buildOverview();
  showStatistic();
}

/** The thumbnails that there are, as maps or as numbers. */
export function showStatistic() {
  sizeOverview();
  markChosen();
  drawOverview();
  tell(state.layer, state.head);
}

export function drawOverview() {
  if (state.statistic === "maps" && patchesOf()) {
    drawPictureScale("overview-scale");
  } else if (state.statistic === "maps") {
    const { tileEnd } = scaleEnds();
    drawScale("overview-scale", weightTicks(tileEnd), scaleCaption(state.item.sections[state.section].layers[0], leavesOutSpecial()));
  } else {
    drawNumberScale();
  }
  drawHeads();
}

/** Draw every row, those in view first; on a screen the browser may answer between rows. */
export function drawHeads() {
  const turn = ++overview.turn;
  const box = byId("overview");
  const first = overview.rows.findIndex(({ line }) => line.offsetTop + line.offsetHeight > box.scrollTop);
  const rows = [...overview.rows.slice(first), ...overview.rows.slice(0, first)].filter(({ canvas }) => canvas);
  const paint = state.statistic === "maps" ? thumbnailPainter() : numberPainter();
  const size = slotSize();
  const drawSome = () => {
    const end = performance.now() + SLICE;
    while (rows.length && turn === overview.turn && (printed.matches || performance.now() < end)) drawRow(rows.shift(), paint, size);
    if (rows.length && turn === overview.turn) requestAnimationFrame(drawSome);
  };
  drawSome();
}

/** Width of a thumbnail in pixels of the screen. */
function slotSize() {
  const [button] = overview.buttons.values();
  const most = columnCount() > MANY ? THUMBNAIL : 2 * THUMBNAIL;
  return Math.max(8, Math.min(most, Math.round(button.clientWidth * (devicePixelRatio || 1))));
}

function drawRow({ canvas, heads }, paint, size) {
  canvas.width = overview.columns * size;
  canvas.height = size;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  const gap = Math.max(1, Math.round(size / 22));
  heads.forEach(([layer, head], column) => {
    const { width, height } = paint(layer, head);
    const scale = (size - 2 * gap) / Math.max(width, height);
    const across = patchesOf() ? [width * scale, height * scale] : [size - 2 * gap, size - 2 * gap];
    const left = column * size + (size - across[0]) / 2;
    context.drawImage(scratch, 0, 0, width, height, left, (size - across[1]) / 2, ...across);
    context.strokeStyle = lineColor;
    context.strokeRect(left - 0.5, (size - across[1]) / 2 - 0.5, across[0] + 1, across[1] + 1);
  });
}

const scratch = document.createElement("canvas"); // one thumbnail, on its way to the canvas of its row
let lineColor = "";

function thumbnailPainter() {
  lineColor = getComputedStyle(byId("map")).outlineColor;
  for (const button of overview.buttons.values()) if (button.firstChild) button.replaceChildren();
  return (layer, head) => {
    if (patchesOf()) drawPictureThumbnail(scratch, layer, head, THUMBNAIL);
    else paintHead(scratch, state, layer, head, THUMBNAIL);
    return scratch;
  };
}

/** Paints a head as one colour, with its number in its button. */
function numberPainter() {
  const [low, high] = numberRange();
  lineColor = "transparent";
  return (layer, head) => {
    const share = high > low ? ((valueOf(layer, head) ?? low) - low) / (high - low) : 0;
    const color = isSigned() ? changes[Math.round(255 * (0.1 + 0.8 * share))] : colors[Math.round(255 * (0.04 + 0.8 * share))];
    scratch.width = scratch.height = 1;
    fill(scratch, (pixels) => pixels.fill(color));
    const label = document.createElement("span");
    label.textContent = valueText(layer, head);
    label.style.color = readableOn(color);
    overview.buttons.get(layer + "-" + head).replaceChildren(label);
    return scratch;
  };
}

export function markChosen() {
  const chosen = overview.buttons.get(state.layer + "-" + state.head);
  if (overview.chosen && overview.chosen !== chosen) {
    overview.chosen.setAttribute("aria-pressed", "false");
    overview.chosen.tabIndex = -1;
  }
  chosen.setAttribute("aria-pressed", "true");
  chosen.tabIndex = 0;
  overview.chosen = chosen;
  scrollToHead(chosen);
}

/** Scroll the overview, and nothing else, until the head is in view beside the names of rows and columns. */
function scrollToHead(button) {
  const box = byId("overview");
  const [outer, inner] = [box.getBoundingClientRect(), button.getBoundingClientRect()];
  const names = inner.height; // about the room that they take
  if (inner.top < outer.top + names) box.scrollTop += inner.top - outer.top - names;
  else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + names / 2;
  if (inner.left < outer.left + 2 * names) box.scrollLeft += inner.left - outer.left - 2 * names;
  else if (inner.right > outer.right) box.scrollLeft += inner.right - outer.right + names / 2;
}
