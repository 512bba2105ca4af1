// ---- showing and keeping a query, or a cell, of the head that is large ----------------------------------------------

import { writeAddress } from "./page_address.js";
import { drawArcs } from "./page_arcs.js";
import { readColors } from "./page_color.js";
import { showFinding, showReadout } from "./page_finding.js";
import { drawMap, markLabel, showCross, showSpan } from "./page_map.js";
import { drawOverview } from "./page_overview.js";
import { showSearch } from "./page_search.js";
import { shadeText, showList, showSum } from "./page_shading.js";
import { drawViews } from "./page_side_by_side.js";
import { state } from "./page_state.js";
import { setView } from "./page_view.js";

/** Show a query's row, or one weight of it, for as long as the pointer is there. */
export function show(query, key) {
  state.shown = { query, key };
  showReadout(query, key);
  showCross(query, key);
  markLabel("rows", state.current.rows.names, query, "top");
  markLabel("columns", state.current.columns.names, key, "left");
  showList(query);
  shadeText(query);
  drawArcs(query);
}

/** Keep a query, or a cell. */
export function pin(query, key) {
  [state.query, state.key] = [query, key];
  show(query, key);
  showFinding();
  showSearch();
  writeAddress();
  if (state.span && !state.span.rows) {
    showSpan();
    showSum();
  }
}

export function showAll() {
  const { rows, columns } = state.current;
  setView(0, 0, rows.names.length, columns.names.length);
  show(state.query, state.key);
}

export function redraw() {
  readColors();
  drawOverview();
  drawViews();
  drawMap();
  show(state.query, state.key);
}
