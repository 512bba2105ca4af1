// ---- all heads as squares -------------------------------------------------------------------------------------------

import { chooseByClick, walk } from "./census_choose.js";
import { colorOfValue, nameOfHead, headsOf, layerCount, meaningOf, rangeOf, valueOf } from "./census_heads.js";
import { brief, css, drawScale, evenTicks, readableOn, weightTicks } from "./page_color.js";
import { byId, data, element, say } from "./page_data.js";

const NUMBER = 34; // pixels that a number needs

export function drawGrid() {
  const metric = byId("metric").value;
  const columns = Math.max(...data.heads.map(({ head }) => head)) + 1;
  const hasNumbers = byId("grid").clientWidth / (columns + 1) >= NUMBER;
  const rows = [named(element("div"), "row")];
  rows[0].append(named(element("span", "", "corner"), "cell"));
  const step = hasNumbers ? 1 : 4;
  for (let head = 0; head < columns; head++) {
    rows[0].append(named(element("span", head % step ? "" : String(head)), "columnheader"));
  }
  for (let layer = 0; layer < layerCount; layer++) {
    const row = named(element("div"), "row");
    row.append(named(element("span", String(layer)), "rowheader"));
    for (const at of headsOf(layer)) row.append(drawSquare(at, metric, hasNumbers));
    rows.push(row);
  }
  byId("grid").replaceChildren(...rows);
  const caption = `${metric}: ${meaningOf(metric)}`;
  if (metric in data.least) drawScale("scale", weightTicks(1), caption + say`; colour follows its square root`);
  else drawScale("scale", evenTicks(...rangeOf(metric)), caption);
}

function named(part, role) {
  part.setAttribute("role", role);
  return part;
}

function drawSquare(at, metric, hasNumbers) {
  const value = valueOf(data.heads[at], metric);
  const [cell, square, color] = [named(element("span"), "gridcell"), element("button"), colorOfValue(value, metric)];
  const text = value === null ? "–" : brief(value);
  square.type = "button";
  square.style.background = css(color);
  square.style.color = readableOn(color);
  square.title = `${nameOfHead(data.heads[at])}: ${text}`;
  square.setAttribute("aria-label", square.title);
  square.dataset.head = at;
  if (hasNumbers) square.textContent = text;
  cell.append(square);
  return cell;
}

export function listenToGrid() {
  const box = byId("grid");
  box.addEventListener("click", ({ target }) => {
    const square = target.closest("button");
    if (square) chooseByClick(Number(square.dataset.head));
  });
  box.addEventListener("keydown", (event) => walk(event, box));
}
