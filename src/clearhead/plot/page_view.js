// ---- moving and zooming the view of the map -------------------------------------------------------------------------

import { drawMap, SMALLEST_VIEW } from "./page_map.js";
import { state } from "./page_state.js";

export function fit() {
  const { rows, columns } = state.current;
  state.view = { row: 0, column: 0, rows: rows.names.length, columns: columns.names.length };
}

export function setView(row, column, rows, columns) {
  const [allRows, allColumns] = [state.current.rows.names.length, state.current.columns.names.length];
  const inside = (count, all) => Math.max(Math.min(SMALLEST_VIEW, all), Math.min(all, Math.round(count)));
  const view = { rows: inside(rows, allRows), columns: inside(columns, allColumns) };
  view.row = Math.max(0, Math.min(allRows - view.rows, Math.round(row)));
  view.column = Math.max(0, Math.min(allColumns - view.columns, Math.round(column)));
  const same = Object.keys(view).every((name) => view[name] === state.view[name]);
  state.view = view;
  if (!same) drawMap();
  return !same;
}

/** Keep a query and a key where they are while everything around them grows by 1 / `factor`. */
export function zoom(factor, query, key) {
  const { view } = state;
  const [rows, columns] = [view.rows * factor, view.columns * factor];
  const [down, across] = [(query + 0.5 - view.row) / view.rows, (key + 0.5 - view.column) / view.columns];
  return setView(query + 0.5 - down * rows, key + 0.5 - across * columns, rows, columns);
}

/** Zoom about the cell that is pointed at, or the middle. */
export function zoomHere(factor) {
  const { view } = state;
  const { query, key } = state.shown;
  const seen = query >= view.row && query < view.row + view.rows;
  zoom(factor, seen ? query : view.row + view.rows / 2, key ?? view.column + view.columns / 2);
}

export function zoomToSpan() {
  if (!state.span) return;
  const rows = state.span.rows || [state.query, state.query];
  const { columns } = state.span;
  const [height, width] = [rows[1] - rows[0] + 1, columns[1] - columns[0] + 1];
  const side = Math.max(height, width);
  setView(rows[0] - (side - height) / 2, columns[0] - (side - width) / 2, side, side);
}

export function reveal(query, key) {
  const { view } = state;
  const moved = (first, count, at) => (at < first ? at : at >= first + count ? at - count + 1 : first);
  setView(
    moved(view.row, view.rows, query),
    key === null ? view.column : moved(view.column, view.columns, key),
    view.rows,
    view.columns,
  );
}
