// ---- files: the map as SVG, the head as CSV -------------------------------------------------------------------------

import { byId, data, say } from "./page_data.js";
import { state } from "./page_state.js";

function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  const { label, heads } = data.sections[state.section].layers[state.layer];
  link.download = `layer-${label}-head-${heads[state.head]}.${name}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Keys across, queries down; where single weights are not known, tiles by their first and last token. */
function csvOfHead() {
  const { grids, rows, columns } = state.current;
  const grid = state.current.complete ? grids[0] : grids.at(-1);
  const spans = (axis, count, row, start) => {
    const [first, last] = [row(0), row(axis.names.length - 1)];
    return Array.from({ length: last - first + 1 }, (_, at) => {
      const [from, to] = [Math.max(0, start(first + at)), Math.min(axis.names.length, start(first + at + 1)) - 1];
      const name = grid.exact ? axis.names[from] : `${axis.names[from]} … ${axis.names[to]}`;
      return { at: first + at, name };
    });
  };
  const down = spans(rows, grid.rows, grid.row, grid.rowStart);
  const across = spans(columns, grid.columns, grid.column, grid.columnStart);
  const lines = down.map(({ at, name }) => [name, ...across.map((column) => grid.values[at * grid.columns + column.at].toFixed(4))]);
  const corner = say`query` + " \\ " + say`key` + (state.current.renormalised ? say` (special tokens left out, the others renormalised)` : "");
  return [[corner, ...across.map(({ name }) => name)], ...lines].map((line) => line.map(quotedField).join(",")).join("\r\n") + "\r\n";
}

/** A field in quotes; one that a spreadsheet would compute is kept as text. */
function quotedField(text) {
  const isNumber = /^-?[\d.]+$/.test(text);
  return `"${(isNumber || !/^[=+\-@\t\r]/.test(text) ? text : "'" + text).replaceAll('"', '""')}"`;
}

/** The map as it is on the screen: its cells as a picture in the drawing, its labels as text. */
function svgOfMap() {
  const parsed = new DOMParser().parseFromString("<svg></svg>", "text/html");
  const svg = parsed.querySelector("svg");
  const make = (name, attributes, text = "") => {
    const made = parsed.createElementNS(svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  };
  const cells = byId("cells");
  const [left, top] = [byId("rows").offsetWidth + 6, byId("columns").offsetHeight + 6];
  const [width, height] = [cells.clientWidth, cells.clientHeight];
  const style = getComputedStyle(document.body);
  const text = { "font-family": "sans-serif", "font-size": 12, fill: style.color };
  svg.setAttribute("viewBox", `0 0 ${left + width + 8} ${top + height + 8}`);
  svg.append(
    make("title", {}, say`${byId("head-title").textContent}: queries down, keys across`),
    make("rect", { width: "100%", height: "100%", fill: style.backgroundColor }),
    make("image", { x: left, y: top, width, height, href: cells.toDataURL(), "image-rendering": "pixelated", preserveAspectRatio: "none" }),
  );
  for (const label of byId("rows").querySelectorAll("span:not(.covered)")) {
    svg.append(make("text", { ...text, x: left - 6, y: top + parseFloat(label.style.top) + 4, "text-anchor": "end" }, label.textContent));
  }
  for (const label of byId("columns").querySelectorAll("span:not(.covered)")) {
    const x = left + parseFloat(label.style.left) + 4;
    svg.append(make("text", { ...text, transform: `translate(${x} ${top - 6}) rotate(-90)` }, label.textContent));
  }
  return new XMLSerializer().serializeToString(svg);
}

export function listenToSave() {
  byId("save").hidden = parent !== window; // the frame of a notebook may not write files
  byId("save-svg").addEventListener("click", () => save("svg", "image/svg+xml", svgOfMap()));
  byId("save-csv").addEventListener("click", () => save("csv", "text/csv", csvOfHead()));
}
