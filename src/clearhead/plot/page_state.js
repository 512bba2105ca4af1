// ---- what is shown, and what follows from it ------------------------------------------------------------------------

import { data, say } from "./page_data.js";

export const state = {
  number: data.compared ? data.compared.views.length - 1 : 0, // of the item
  item: null, // its description
  bytes: null, // and its numbers
  section: data.section,
  layer: data.layer,
  head: data.head,
  statistic: data.statistic,
  order: "layers", // of the overview
  words: false, // whether word pieces are to be merged
  arcs: false, // whether the largest weights are drawn over the text
  special: false, // whether special tokens are to be left out
  current: null, // the head that is large, between tokens or words
  query: 0, // kept by a click
  key: null,
  shown: { query: 0, key: null }, // under the pointer
  span: null, // selected { rows or null for the query, columns }
  anchor: null, // where the keyboard began the selection
  view: null,
  cell: 1,
  tiled: false,
};

/** Where the keys of this section lie on the picture, or nothing for a text. */
export function patchesOf() {
  return state.item && state.item.picture ? state.item.sections[state.section].patches : undefined;
}

export function isSame() {
  return data.sections[state.section].same;
}

/** Whether what is shown is a difference. */
export function isSigned() {
  return Boolean(state.item && state.item.sections[state.section].layers[0].signed);
}

export function scaleEnds(signed = isSigned()) {
  const ends = data.sections[state.section];
  if (!signed) return ends;
  return { tileEnd: ends.changedTileEnd, finerEnd: ends.changedFinerEnd, cellEnd: ends.changedCellEnd };
}

/** How many views there are of every text. */
export function viewCount() {
  return data.compared ? data.compared.views.length : 1;
}

export function viewNumber() {
  return state.number % viewCount();
}

export function placesOf(side) {
  const places = data.compared.places[state.number - viewNumber() + 2];
  return places ? places[state.section][side] : null;
}

/** The query and the key that all heads are asked about: until a key is chosen, it is what the query looks at most. */
export function askedPair() {
  const { query, key, current } = state;
  return [query, key ?? (current.listed ? (current.largest(query)[0]?.key ?? null) : null)];
}

/** Places of the tokens that the other text does not have. */
export function differing(side) {
  const places = data.compared && viewNumber() < 2 ? placesOf(side) : null;
  if (!places || state.current.rows.words) return new Set();
  const shared = new Set(places[viewNumber()]);
  const axis = side === "queries" ? state.current.rows : state.current.columns;
  return new Set([...axis.names.keys()].filter((place) => !shared.has(place)));
}

export function specialKeys() {
  return state.item.texts[state.item.sections[state.section].keys].special;
}

export function eachHead(visit) {
  data.sections[state.section].layers.forEach((layer, index) => layer.heads.forEach((_, head) => visit(index, head)));
}

export function allHeads() {
  const heads = [];
  eachHead((layer, head) => heads.push([layer, head]));
  return heads;
}

export function columnCount() {
  return Math.max(...data.sections[state.section].layers.map((layer) => layer.heads.length));
}

/** The statistic that is shown or sorted by, unless a description has it anyway. */
export function toldStatistic() {
  const { statistics } = data.sections[state.section];
  const usual = isSigned() ? ["entropy", "divergence"] : ["entropy"];
  return [state.statistic, state.order].find((name) => statistics.includes(name) && !usual.includes(name));
}

/** A head's layer and number; before them its kind of attention, if there is another. */
export function headName(layer, head, section = state.section) {
  const { title, layers } = data.sections[section];
  const name = say`layer ${layers[layer].label}, head ${layers[layer].heads[head]}`;
  return data.sections.length > 1 ? `${title}, ${name}` : name;
}
