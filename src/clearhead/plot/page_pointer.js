// ---- pointer and keyboard on the map --------------------------------------------------------------------------------

import { byId, clamp, ordered } from "./page_data.js";
import { used } from "./page_finding.js";
import { isZoomed, showSpan } from "./page_map.js";
import { showSum } from "./page_shading.js";
import { pin, show, showAll } from "./page_show.js";
import { state } from "./page_state.js";
import { reveal, setView, zoom, zoomHere, zoomToSpan } from "./page_view.js";

const ARROWS = {
  ArrowUp: { down: -1, right: 0 },
  ArrowDown: { down: 1, right: 0 },
  ArrowLeft: { down: 0, right: -1 },
  ArrowRight: { down: 0, right: 1 },
};

export function arrow(event) {
  return event.ctrlKey || event.metaKey || event.altKey ? undefined : ARROWS[event.key];
}

function cellUnder(event) {
  const { view, cell } = state;
  const box = byId("cells").getBoundingClientRect();
  return [
    view.row + clamp(Math.floor((event.clientY - box.top) / cell), view.rows),
    view.column + clamp(Math.floor((event.clientX - box.left) / cell), view.columns),
  ];
}

export function listenToMap() {
  const map = byId("map");
  let anchor = null;
  map.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    anchor = cellUnder(event);
    if (event.pointerType === "mouse") map.setPointerCapture(event.pointerId);
  });
  map.addEventListener("pointermove", (event) => {
    const [query, key] = cellUnder(event);
    const pressed = anchor && event.buttons & 1;
    if (pressed && (query !== anchor[0] || key !== anchor[1])) {
      select(ordered(anchor[0], query), ordered(anchor[1], key));
    }
    show(query, key);
  });
  map.addEventListener("pointerup", (event) => {
    const [query, key] = cellUnder(event);
    if (anchor && query === anchor[0] && key === anchor[1]) pin(query, key);
    anchor = null;
  });
  map.addEventListener("pointerleave", () => show(state.query, state.key));
  map.addEventListener("dblclick", (event) => zoom(0.5, ...cellUnder(event)));
  map.addEventListener("wheel", wheel, { passive: false });
  map.addEventListener("keydown", walkCells);
}

function wheel(event) {
  const lines = event.deltaMode === 1 ? 16 : 1;
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    zoom(Math.exp(Math.max(-100, Math.min(100, event.deltaY * lines)) / 150), ...cellUnder(event));
  } else if (isZoomed()) {
    const { view, cell } = state;
    const step = (pixels) => (pixels ? Math.sign(pixels) * Math.max(1, Math.abs(pixels * lines) / cell) : 0);
    const [x, y] = event.shiftKey ? [event.deltaY, 0] : [event.deltaX, event.deltaY];
    if (setView(view.row + step(y), view.column + step(x), view.rows, view.columns)) event.preventDefault();
  }
}

function walkCells(event) {
  const step = arrow(event);
  if (step) {
    event.preventDefault();
    const from = [state.query, state.key ?? state.view.column];
    const query = clamp(state.query + step.down, state.current.rows.names.length);
    const key = state.key === null ? from[1] : clamp(state.key + step.right, state.current.columns.names.length);
    if (event.shiftKey) extend(from, [query, key]);
    pin(query, key);
    reveal(query, key);
    return;
  }
  const keys = {
    "+": () => zoomHere(0.5),
    "=": () => zoomHere(0.5),
    "-": () => zoomHere(2),
    0: () => showAll(),
    Enter: zoomToSpan,
  };
  if (keys[event.key] && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    keys[event.key]();
  }
}

/** Grow the selection from where the keyboard began it. */
function extend(from, to) {
  state.anchor = state.span && state.anchor ? state.anchor : from;
  select(ordered(state.anchor[0], to[0]), ordered(state.anchor[1], to[1]), state.anchor);
}

export function select(rows, columns, anchor = null) {
  state.span = { rows, columns };
  state.anchor = anchor;
  used("sum");
  showSpan();
  showSum();
}

export function unselect() {
  state.span = state.anchor = null;
  showSpan();
  showSum();
}
