// ---- the page of a census: all heads as points and as a grid, and what one head does ----------------------------------

import { byId, data, say } from "./page_data.js";

const svg = (name, attributes, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
};
const html = (name, text = "", className = "") => {
  const element = document.createElement(name);
  element.textContent = text;
  element.className = className;
  return element;
};
const layers = Math.max(...data.heads.map((head) => head.layer)) + 1;
const hue = (layer) => `oklch(0.64 0.14 ${Math.round(30 + (300 * layer) / Math.max(1, layers - 1))})`;
const shown = (value) => (value === null ? "–" : Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(3));
const nameOf = (head) => say`layer ${head.layer}, head ${head.head}`;
const valueOf = (head, metric) => head.values[data.metrics.findIndex((each) => each.name === metric)];
let chosen = 0;

function bounds(metric) {
  const known = data.heads.map((head) => valueOf(head, metric)).filter((value) => value !== null);
  if (!known.length) return [0, 1];
  const low = data.masses.includes(metric) ? 0 : Math.min(...known);
  return [low, Math.max(...known, low + 1e-9)];
}

function choose(at, focus = null) {
  chosen = at;
  for (const element of document.querySelectorAll("[data-head]")) {
    const is = Number(element.dataset.head) === at;
    element.setAttribute("aria-pressed", is);
    element.setAttribute("tabindex", is ? 0 : -1);
    if (is && focus && element.parentElement.closest(focus)) element.focus();
  }
  const { layer, head } = data.heads[at];
  if (location.protocol !== "about:") history.replaceState(null, "", `#layer=${layer}&head=${head}`);
  showHead(data.heads[at]);
}

function listen(element, place) {
  element.addEventListener("click", () => choose(Number(element.dataset.head)));
  element.addEventListener("keydown", (event) => {
    const width = data.heads.filter((head) => head.layer === data.heads[chosen].layer).length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: width, ArrowUp: -width }[event.key];
    if (event.key === "Enter" || event.key === " ") choose(Number(element.dataset.head));
    else if (step) choose(Math.min(data.heads.length - 1, Math.max(0, chosen + step)), place);
    else return;
    event.preventDefault();
  });
}

function drawScatter() {
  const [across, up] = [byId("across").value, byId("up").value];
  const [[left, right], [low, high]] = [bounds(across), bounds(up)];
  const x = (value) => 56 + (560 * (value - left)) / (right - left);
  const y = (value) => 390 - (360 * (value - low)) / (high - low);
  const parts = [];
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const [atX, atY] = [left + part * (right - left), low + part * (high - low)];
    parts.push(svg("line", { x1: 56, x2: 616, y1: y(atY), y2: y(atY) }));
    parts.push(svg("text", { x: x(atX), y: 408, "text-anchor": "middle" }, shown(atX)));
    parts.push(svg("text", { x: 50, y: y(atY) + 4, "text-anchor": "end" }, shown(atY)));
  }
  parts.push(svg("text", { x: 336, y: 432, "text-anchor": "middle" }, across + " →"));
  parts.push(svg("text", { x: 8, y: 12 }, "↑ " + up));
  data.heads.forEach((head, at) => {
    const [here, there] = [valueOf(head, across), valueOf(head, up)];
    if (here === null || there === null) return;
    const label = `${nameOf(head)}: ${across} ${shown(here)}, ${up} ${shown(there)}`;
    const place = { cx: x(here), cy: y(there), r: data.heads.length > 400 ? 5 : 7, fill: hue(head.layer), role: "button", "aria-label": label };
    const point = svg("circle", place);
    point.append(svg("title", {}, label));
    point.dataset.head = at;
    listen(point, "#scatter");
    parts.push(point);
  });
  byId("scatter").replaceChildren(...parts);
}

function drawGrid() {
  const metric = byId("metric").value;
  const [low, high] = bounds(metric);
  const rows = [];
  for (let layer = 0; layer < layers; layer++) {
    const row = html("div");
    row.setAttribute("role", "row");
    const header = html("span", String(layer));
    header.setAttribute("role", "rowheader");
    row.append(header);
    data.heads.forEach((head, at) => {
      if (head.layer !== layer) return;
      const [cell, button, value] = [html("span"), html("button"), valueOf(head, metric)];
      cell.setAttribute("role", "gridcell");
      cell.style.display = "contents";
      const part = value === null ? 0 : (value - low) / (high - low);
      button.style.background = `color-mix(in oklab, var(--focus) ${Math.round(100 * part)}%, var(--soft))`;
      button.title = `${nameOf(head)}: ${shown(value)}`;
      button.setAttribute("aria-label", button.title);
      button.dataset.head = at;
      listen(button, "#grid");
      cell.append(button);
      row.append(cell);
    });
    rows.push(row);
  }
  byId("grid").replaceChildren(...rows);
  const about = data.metrics.find((each) => each.name === metric);
  byId("scale").textContent = `${shown(low)} … ${shown(high)}: ${about.meaning}`;
}

function showHead(head) {
  byId("head-title").textContent = nameOf(head);
  byId("head-kinds").textContent = [head.module, ...head.kinds].join(" · ");
  const numbers = data.metrics.map((metric, at) => {
    const row = html("tr");
    const name = html("th", metric.name);
    name.setAttribute("scope", "row");
    name.title = metric.meaning;
    row.append(name, html("td", shown(head.values[at])));
    return row;
  });
  byId("numbers").replaceChildren(...numbers);
  byId("strongest").replaceChildren(...(head.rows.length ? head.rows.map(drawRow) : [html("p", say`No text is kept for this head.`, "quiet")]));
  const link = byId("other-page");
  link.hidden = !data.other;
  if (data.other) {
    link.href = `${data.other}#layer=${head.layer}&head=${head.head}&token=0`;
    link.textContent = say`this head on the page of all weights`;
  }
}

function drawRow(row) {
  const box = html("div", "", "strong");
  box.append(html("p", say`${row.metric} ${shown(row.value)}, text ${row.text}, token ${row.position}`, "quiet"));
  const line = html("p");
  line.dir = "auto";
  row.context.forEach(([token, weight], at) => {
    const element = html(at === row.at ? "span" : "mark", token, at === row.at ? "query" : "");
    element.style.background = `color-mix(in oklab, var(--focus) ${Math.round(60 * Math.min(1, weight))}%, transparent)`;
    element.title = shown(weight);
    line.append(element, " ");
  });
  const keys = html("ol", "", "quiet");
  for (const [token, position, weight] of row.keys) keys.append(html("li", `${token} (${position}) ${shown(weight)}`));
  box.append(line, keys);
  if (row.map) box.append(drawMap(row.map));
  return box;
}

function drawMap({ size, levels }) {
  const canvas = html("canvas");
  [canvas.width, canvas.height] = [size, size];
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", say`The weights of the text: queries down, keys across; darker is more.`);
  const context = canvas.getContext("2d");
  const picture = context.createImageData(size, size);
  const bytes = atob(levels);
  for (let at = 0; at < size * size; at++) picture.data.set([31, 111, 178, bytes.charCodeAt(at)], 4 * at);
  context.putImageData(picture, 0, 0);
  return canvas;
}

function fill(id, first, draw) {
  const select = byId(id);
  select.replaceChildren(...data.metrics.map(({ name }) => html("option", name)));
  select.value = first;
  const again = () => { draw(); choose(chosen); };
  select.addEventListener("change", again);
}

function begin() {
  document.documentElement.dataset.script = "";
  fill("across", "previous", drawScatter);
  fill("up", "induction", drawScatter);
  fill("metric", data.metric, drawGrid);
  byId("theme").addEventListener("change", (event) => { document.documentElement.dataset.theme = event.target.value; });
  byId("legend").textContent = say`The colour is the layer, from 0 (red) to ${layers - 1}.`;
  drawScatter();
  drawGrid();
  const read = () => {
    const match = /^#layer=(\d{1,6})&head=(\d{1,6})$/.exec(location.hash);
    const at = match ? data.heads.findIndex((head) => head.layer === Number(match[1]) && head.head === Number(match[2])) : -1;
    choose(at < 0 ? data.first : at);
  };
  addEventListener("hashchange", read);
  read();
}

begin();
