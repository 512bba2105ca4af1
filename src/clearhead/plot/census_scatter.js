// ---- all heads as points --------------------------------------------------------------------------------------------

import { chooseByClick, walk } from "./census_choose.js";
import { colorOfLayer, nameOfHead, layerCount, meaningOf, rangeOf, valueOf } from "./census_heads.js";
import { drawn, roundNumbers } from "./census_svg.js";
import { brief, css } from "./page_color.js";
import { byId, data, element, say } from "./page_data.js";

const MARGIN = { left: 46, right: 14, top: 14, bottom: 42 };
const NAMED = 12; // points of a kind with a name beside them
const NEAR = 24; // pixels from a click to its point
const MANY = 300;
const SWATCHES = 8;
let points = [];

/** A metric as a side of the drawing: where a value lies, and where its numbers stand. */
function sideOf(metric, from, to) {
  const [low, high] = rangeOf(metric);
  const place = (value) => from + ((to - from) * (value - low)) / (high - low);
  const padded = metric in data.least ? place : (value) => from + (to - from) * (0.03 + (0.94 * (value - low)) / (high - low));
  return { metric, place: padded, numbers: roundNumbers(low, high), least: data.least[metric] };
}

export function drawScatter() {
  const box = byId("scatter");
  const width = Math.round(box.getBoundingClientRect().width) || 640;
  const height = Math.round(Math.min(440, Math.max(280, 0.62 * width)));
  box.setAttribute("viewBox", `0 0 ${width} ${height}`);
  box.setAttribute("height", height);
  const x = sideOf(byId("across").value, MARGIN.left, width - MARGIN.right);
  const y = sideOf(byId("up").value, height - MARGIN.bottom, MARGIN.top);
  points = data.heads.flatMap((head, at) => {
    const [across, up] = [valueOf(head, x.metric), valueOf(head, y.metric)];
    return across === null || up === null ? [] : [{ at, head, across, up, x: x.place(across), y: y.place(up) }];
  });
  const radius = data.heads.length > MANY ? 4 : 6;
  const ring = drawn("circle", { id: "ring", r: radius + 2 });
  const marks = points.map((point) => drawPoint(point, x.metric, y.metric, radius));
  box.replaceChildren(...drawAxes(x, y, width, height), ...marks, ring, ...drawNames([y.metric, x.metric], width));
  byId("axes").replaceChildren(...[[say`across`, x.metric], [say`up`, y.metric]].flatMap(([side, metric]) => [
    element("dt", `${side} ${metric}: `),
    element("dd", meaningOf(metric)),
  ]));
  drawLegend();
}

function drawAxes(x, y, width, height) {
  const parts = [];
  const ends = { x1: MARGIN.left, x2: width - MARGIN.right, y1: MARGIN.top, y2: height - MARGIN.bottom };
  const upright = (at) => ({ ...ends, x1: at, x2: at });
  const level = (at) => ({ ...ends, y1: at, y2: at });
  for (const number of x.numbers) {
    parts.push(drawn("line", upright(x.place(number))));
    parts.push(drawn("text", { x: x.place(number), y: ends.y2 + 15, "text-anchor": "middle" }, String(number)));
  }
  for (const number of y.numbers) {
    parts.push(drawn("line", level(y.place(number))));
    parts.push(drawn("text", { x: MARGIN.left - 6, y: y.place(number) + 4, "text-anchor": "end" }, String(number)));
  }
  if (x.least) parts.push(drawn("line", { ...upright(x.place(x.least)), class: "least" }));
  if (y.least) parts.push(drawn("line", { ...level(y.place(y.least)), class: "least" }));
  const middle = { "text-anchor": "middle", class: "name" };
  parts.push(drawn("text", { ...middle, x: (ends.x1 + ends.x2) / 2, y: height - 6 }, `${x.metric} →`));
  parts.push(drawn("text", { ...middle, transform: `translate(11 ${(ends.y1 + ends.y2) / 2}) rotate(-90)` }, `${y.metric} →`));
  return parts;
}

function drawPoint({ at, head, across, up, x, y }, metric, other, radius) {
  const label = `${nameOfHead(head)}: ${metric} ${brief(across)}, ${other} ${brief(up)}`;
  const point = drawn("circle", { cx: x, cy: y, r: radius, fill: css(colorOfLayer(head.layer)), role: "button", "aria-label": label });
  point.dataset.head = at;
  point.append(drawn("title", {}, label));
  return point;
}

/** Names beside the heads of the kinds that are shown, where there is room. */
function drawNames(metrics, width) {
  const ofKinds = metrics.flatMap((metric) => {
    const ranked = points.filter(({ head }) => head.kinds.includes(metric));
    return ranked.sort((a, b) => valueOf(b.head, metric) - valueOf(a.head, metric)).slice(0, NAMED);
  });
  const taken = [];
  return [...new Set(ofKinds)].flatMap(({ head, x, y }) => {
    const name = say`head ${head.layer}.${head.head}`; // numbers alone look like those of an axis
    const length = 8 + 6 * name.length;
    const left = x + 10 + length > width ? x - 10 - length : x + 10;
    if (taken.some((other) => Math.abs(other.left - left) < length && Math.abs(other.y - y) < 14)) return [];
    taken.push({ left, y });
    return [drawn("text", { x: left, y: y + 4, class: "name" }, name)];
  });
}

function drawLegend() {
  const step = Math.ceil(layerCount / SWATCHES);
  const shown = [...Array(layerCount).keys()].filter((layer) => layer % step === 0 || layer === layerCount - 1);
  const swatches = shown.map((layer) => {
    const [label, swatch] = [element("span"), element("i")];
    swatch.style.background = css(colorOfLayer(layer));
    label.append(swatch, String(layer));
    return label;
  });
  const dashes = [byId("across").value, byId("up").value].some((metric) => metric in data.least);
  byId("legend").replaceChildren(say`layer`, ...swatches, ...(dashes ? [element("span", say`dashed: the mean that names a head`)] : []));
}

export function listenToScatter() {
  const box = byId("scatter");
  box.addEventListener("click", (event) => {
    const { left, top } = box.getBoundingClientRect();
    const away = ({ x, y }) => Math.hypot(x - event.clientX + left, y - event.clientY + top);
    const nearest = points.reduce((best, point) => (!best || away(point) < away(best) ? point : best), null);
    if (nearest && away(nearest) <= NEAR) chooseByClick(nearest.at);
  });
  box.addEventListener("keydown", (event) => walk(event, box));
}
