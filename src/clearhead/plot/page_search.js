// ---- which heads look from one token to another ---------------------------------------------------------------------

import { precise } from "./page_color.js";
import { byId, data, element, option, say } from "./page_data.js";
import { leavesOutSpecial } from "./page_grids.js";
import { numbered } from "./page_names.js";
import { showOverview } from "./page_overview.js";
import { evenWeights } from "./page_picture.js";
import { allHeads, askedPair, headName, isSigned, patchesOf, state } from "./page_state.js";
import { pairReader } from "./page_weights.js";

const MOST_FOUND = 8;

/** Fill a menu with every token; until it is used, it holds its choice only. */
export function fillMenu(id) {
  const { names } = id === "from" ? state.current.rows : state.current.columns;
  const chosen = byId(id).value;
  const blank = chosen === "" ? [option("", "…", true)] : [];
  if (byId(id).length < names.length) {
    byId(id).replaceChildren(...blank, ...names.map((_, place) => option(place, numbered(names, place), String(place) === chosen)));
  }
}

export function emptyMenus() {
  for (const id of ["from", "to"]) byId(id).replaceChildren();
}

function chooseInMenu(id, { names }, place) {
  byId(id).querySelector('[value=""]')?.remove();
  if (place === null) byId(id).prepend(option("", "…", true));
  else if (byId(id).length < names.length) byId(id).replaceChildren(option(place, numbered(names, place), true));
  byId(id).value = place ?? "";
}

export function showSearch() {
  const pair = askedPair();
  chooseInMenu("from", state.current.rows, pair[0]);
  chooseInMenu("to", state.current.columns, pair[1]);
  if (state.order === "asked") showOverview();
  byId("search-lead").textContent = "";
  if (pair[1] === null) {
    byId("search-list").replaceChildren();
    byId("search-note").textContent = say`Choose both, or a cell of the map, to rank all heads.`;
    markRanked();
    return;
  }
  const read = pairReader(pair);
  const size = isSigned() ? Math.abs : (weight) => weight;
  const least = isSigned() ? null : evenWeights()?.weights[pair[1]];
  const ranked = allHeads()
    .map(([layer, head]) => ({ place: [state.section, layer, head], ...read(layer, head) }))
    .filter(({ weight }) => !(weight <= least))
    .sort((a, b) => size(b.weight) - size(a.weight));
  const shown = ranked.slice(0, MOST_FOUND);
  byId("search-lead").textContent = shown.length ? say`choose a head:` : "";
  byId("search-list").replaceChildren(
    ...shown.map(({ place, weight, about }) => rankedHead(place, about ? say`about ${precise(weight)}` : precise(weight))),
  );
  const change = isSigned() ? say`Changes of weights, second − first. ` : "";
  const special = leavesOutSpecial() ? say` Special tokens are left out, the other weights renormalised.` : state.special ? say` Special tokens count here.` : "";
  const even = least ? say` Heads with no more than the even weight, ${precise(least)}, are left out.` : "";
  byId("search-note").textContent = change + (ranked.some(({ about }) => about) ? tileNote() : say`Ranked by exact weights.`) + special + even;
  markRanked();
}

function tileNote() {
  if (patchesOf()) return say`“About” is a weight that the page holds in one byte.`;
  return data.sections[state.section].pooling === "max"
    ? say`“About” is the largest weight of a tile; the other weights are exact.`
    : say`“About” is the mean weight of a tile; the other weights are exact.`;
}

/** A head of a ranking, with what it is ranked by. */
export function rankedHead([section, layer, head], value) {
  const button = element("button", say`${headName(layer, head, section)}: ${value}`);
  button.type = "button";
  button.dataset.place = [section, layer, head].join("-");
  const item = element("li");
  item.append(button);
  return item;
}

function markRanked() {
  const place = [state.section, state.layer, state.head].join("-");
  for (const button of document.querySelectorAll(".ranking button")) {
    button.setAttribute("aria-pressed", String(button.dataset.place === place));
  }
}
