// ---- one head, large ------------------------------------------------------------------------------------------------

import { colorOf, drawScale, fill, placesOfPixels, weightTicks } from "./page_color.js";
import { byId, element, say } from "./page_data.js";
import { leavesOutSpecial } from "./page_grids.js";
import { BAR, drawMargins } from "./page_margins.js";
import { isRightToLeft } from "./page_names.js";
import { scaleCaption } from "./page_numbers.js";
import { drawPictureScale, evenWeights, multipleColor } from "./page_picture.js";
import { differing, headName, isSigned, patchesOf, scaleEnds, state } from "./page_state.js";

const LARGEST_CELL = 40;
const LONGEST_LABEL = 16;
const LABEL_HEIGHT = 15;

export const SMALLEST_VIEW = 6;

/** The height of the window; the frame of a notebook is as high as its page. */
function screenHeight() {
  return Math.min(innerHeight, screen.availHeight || innerHeight);
}

export function drawMap() {
  const { view } = state;
  const { rows, columns } = state.current;
  const labels = [labelWidth(rows.names), labelWidth(columns.names)];
  const wide = Math.max(150, byId("frame").parentElement.clientWidth - labels[0] - BAR - 44);
  const high = Math.max(320, screenHeight() * (patchesOf() ? 0.6 : 0.86) - labels[1] - BAR);
  state.cell = Math.min(wide / view.columns, high / view.rows, LARGEST_CELL);
  const canvas = byId("cells");
  const ratio = devicePixelRatio || 1;
  const size = [view.columns, view.rows].map((count) => Math.max(1, Math.round(count * state.cell)));
  [canvas.style.width, canvas.style.height] = size.map((pixels) => pixels + "px");
  [canvas.width, canvas.height] = size.map((pixels) => Math.round(pixels * ratio));
  const end = paintCells(canvas, ratio);
  placeLabels(labels);
  drawMargins(size, ratio);
  drawMapScale(end);
  showPart();
  showNote();
  showCross(state.shown.query, state.shown.key);
  showSpan();
}

/** Every pixel asks the finest grid that knows its place; a grid finer than the pixels would lose weights. */
function paintCells(canvas, ratio) {
  const { view, current } = state;
  const { tileEnd, finerEnd, cellEnd } = scaleEnds();
  const signed = isSigned();
  const even = evenWeights();
  const visible = current.grids.filter((grid) => state.cell * ratio >= 0.99 || grid === current.grids.at(-1));
  const lookups = visible.map((grid) => ({
    grid,
    end: grid.exact ? cellEnd : grid.finer ? finerEnd : tileEnd,
    lines: placesOfPixels(canvas.height, view.row, view.rows, grid.row),
    across: placesOfPixels(canvas.width, view.column, view.columns, grid.column),
  }));
  fill(canvas, (pixels) => {
    for (let y = 0; y < canvas.height; y++) {
      // The coarsest first: what a finer grid knows goes over it.
      for (const { grid, end, lines, across } of [...lookups].reverse()) {
        if (lines[y] < 0) continue;
        const [values, row, to] = [grid.values, lines[y] * grid.columns, y * canvas.width];
        for (let x = 0; x < across.length; x++) {
          if (across[x] < 0) continue;
          const value = values[row + across[x]];
          pixels[to + x] = even ? multipleColor(value, even.weights[across[x]], even.end) : colorOf(value, end, signed);
        }
      }
    }
  });
  state.tiled = !lookups[0].grid.exact || !lookups[0].lines.some((place) => place >= 0) || !lookups[0].across.some((place) => place >= 0);
  return state.tiled ? lookups.at(-1).end : cellEnd;
}

function drawMapScale(end) {
  if (patchesOf()) return drawPictureScale("map-scale");
  const layer = state.item.sections[state.section].layers[state.layer];
  const { rows, columns } = state.current.grids.at(-1);
  const caption = scaleCaption({ ...layer, grid: state.tiled ? [rows, columns] : layer.size }, state.current.renormalised);
  drawScale("map-scale", weightTicks(end), caption);
}

function placeLabels([rowsWidth, columnsHeight]) {
  byId("rows").style.width = rowsWidth + "px";
  byId("columns").style.height = columnsHeight + "px";
  const { view, current } = state;
  const step = Math.max(1, Math.ceil(LABEL_HEIGHT / state.cell));
  const marks = { rows: differing("queries"), columns: differing("keys") };
  for (const [id, names, side, first, count] of [
    ["rows", current.rows.names, "top", view.row, view.rows],
    ["columns", current.columns.names, "left", view.column, view.columns],
  ]) {
    const labels = [];
    for (let place = first; place < first + count; place += step) {
      labels.push(buildLabel(names, place, side));
      labels.at(-1).classList.toggle("differs", marks[id].has(place));
    }
    byId(id).replaceChildren(...labels);
  }
}

function buildLabel(names, place, side) {
  const mark = element("span", shortened(names[place]));
  const first = side === "top" ? state.view.row : state.view.column;
  mark.style[side] = (place - first + 0.5) * state.cell + "px";
  mark.dataset.place = place;
  return mark;
}

const labelWidths = new WeakMap(); // of long texts worth remembering

function labelWidth(names) {
  if (!labelWidths.has(names)) labelWidths.set(names, widthOf(names));
  return labelWidths.get(names);
}

function widthOf(names) {
  const widths = names.map((name) => [...shortened(name)].reduce((sum, c) => sum + (c > "\u1100" ? 14 : 7.6), 0));
  return Math.ceil(widths.reduce((most, width) => Math.max(most, width), 0)) + 14;
}

function shortened(name) {
  if (name.length <= LONGEST_LABEL) return name;
  const characters = [...new Intl.Segmenter().segment(name)].map(({ segment }) => segment);
  return characters.length > LONGEST_LABEL ? characters.slice(0, LONGEST_LABEL - 1).join("") + "…" : name;
}

export function markLabel(id, names, place, side) {
  const box = byId(id);
  for (const old of box.querySelectorAll(".extra")) old.remove();
  for (const old of box.querySelectorAll(".active, .covered")) old.classList.remove("active", "covered");
  const [first, count] = side === "top" ? [state.view.row, state.view.rows] : [state.view.column, state.view.columns];
  if (place === null || place < first || place >= first + count) return;
  let mark = box.querySelector(`[data-place="${place}"]`);
  if (!mark) {
    mark = buildLabel(names, place, side);
    mark.classList.add("extra");
    box.append(mark);
  }
  mark.classList.add("active");
  for (const other of box.children) {
    const away = Math.abs(other.dataset.place - place) * state.cell;
    other.classList.toggle("covered", other !== mark && away < LABEL_HEIGHT);
  }
}

export function showCross(query, key) {
  const { view } = state;
  putFrame("cross", [query, query], key === null ? [view.column, view.column + view.columns - 1] : [key, key]);
}

export function showSpan() {
  if (!state.span) byId("span").hidden = true;
  else putFrame("span", state.span.rows || [state.query, state.query], state.span.columns);
}

/** Put a frame around cells, as far as they are in view. */
function putFrame(id, rows, columns) {
  const { view, cell } = state;
  const [top, bottom] = [Math.max(rows[0], view.row), Math.min(rows[1] + 1, view.row + view.rows)];
  const [left, right] = [Math.max(columns[0], view.column), Math.min(columns[1] + 1, view.column + view.columns)];
  const frame = byId(id);
  frame.hidden = top >= bottom || left >= right;
  frame.classList.toggle("thin", cell < 6);
  frame.style.top = (top - view.row) * cell + "px";
  frame.style.left = (left - view.column) * cell + "px";
  frame.style.height = Math.max(2, (bottom - top) * cell) + "px";
  frame.style.width = Math.max(2, (right - left) * cell) + "px";
}

/** The heads of this section that carry exact crops. */
function exactHeads() {
  return state.item.sections[state.section].layers.flatMap(({ crops }, layer) => Object.keys(crops).map((head) => headName(layer, head)));
}

function showNote() {
  const { grids, complete } = state.current;
  const notes = [];
  if (!complete) {
    const listed = state.current.listed ? say`; weights that are among their query’s largest are known exactly` : "";
    notes.push(say`Tiles of several tokens${listed}.`);
    if (grids[0].exact) {
      const [first, last] = [grids[0].rowStart(0), grids[0].columnStart(0)];
      notes.push(
        say`Every weight is known for queries ${first}–${first + grids[0].rows - 1} and keys ${last}–${last + grids[0].columns - 1}.`,
      );
    } else if (exactHeads().length) {
      notes.push(say`Exact weights are here for ${exactHeads().join("; ")}.`);
    }
    if (state.words) notes.push(say`Word pieces stay apart here: merging needs every weight of the head.`);
    if (state.special) notes.push(say`Special tokens stay here: leaving them out needs every weight of the head.`);
  }
  if (state.current.renormalised) {
    notes.push(say`Special tokens are left out: the weights of the other keys are renormalised to sum to 1 in every row.`);
    notes.push(
      leavesOutSpecial()
        ? say`Statistics of heads count all tokens.`
        : say`Thumbnails, statistics of heads and the ranking count all tokens.`,
    );
  } else if (state.special && isSigned()) {
    notes.push(say`Special tokens stay in a difference.`);
  }
  const { columns } = state.current;
  if (isRightToLeft(columns.names)) {
    notes.push(say`The text is read from right to left. The map has the first key on the left and the first query at the top.`);
  }
  byId("note").textContent = notes.join(" ");
}

export function isZoomed() {
  const { rows, columns } = state.current;
  return state.view.rows < rows.names.length || state.view.columns < columns.names.length;
}

function showPart() {
  const { view } = state;
  byId("part").textContent = isZoomed()
    ? say`queries ${view.row}–${view.row + view.rows - 1}, keys ${view.column}–${view.column + view.columns - 1}`
    : "";
  byId("zoom-fit").disabled = byId("zoom-out").disabled = !isZoomed();
  byId("zoom-in").disabled = Math.max(view.rows, view.columns) <= SMALLEST_VIEW;
}
