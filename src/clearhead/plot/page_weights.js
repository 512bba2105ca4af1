// ---- single weights of any head, without unpacking the head ---------------------------------------------------------

import { data, decoded } from "./page_data.js";
import { leavesOutSpecial, rowOfTiles, tiling } from "./page_grids.js";
import { askedPair, state } from "./page_state.js";

/** Reads a weight of any head: itself, or about, from its tile. */
function weightReader() {
  const { bytes } = state;
  const { layers, queries } = state.item.sections[state.section];
  const length = state.item.texts[queries].names.length;
  const { pooling } = data.sections[state.section];
  const isRenormalised = leavesOutSpecial();
  const one = (place, at) => decoded(bytes, place, at, 1)[0];
  return (layer, head, query, key) => {
    if (isRenormalised) {
      const grid = tiling(layers[layer]);
      return { weight: rowOfTiles(bytes, layers[layer], head, query)[grid.column(key)], about: grid.rounded };
    }
    const crop = layers[layer].crops[head];
    const [top, bottom, left, right] = crop ? [...crop.queries, ...crop.keys] : [0, 0, 0, 0];
    if (query >= top && query < bottom && key >= left && key < right) {
      return { weight: one(crop.weights, (query - top) * (right - left) + key - left), about: false };
    }
    const finer = layers[layer].finer[head];
    const source = { ...layers[layer], ...finer };
    const place = finer ? 0 : head;
    const grid = tiling(source);
    const value = one(source.map, (place * grid.rows + grid.row(query)) * grid.columns + grid.column(key));
    if (grid.exact) return { weight: value, about: grid.rounded };
    const from = (place * length + query) * source.count;
    const listed = decoded(bytes, source.indices, from, source.count).indexOf(key);
    if (listed >= 0) return { weight: one(source.weights, from + listed), about: false };
    const across = grid.columnStart(grid.column(key) + 1) - grid.columnStart(grid.column(key));
    return { weight: pooling === "max" ? value : value / across, about: true };
  };
}

/** The tokens of a query or key of the large map: itself, or the pieces of its word. */
function piecesOf(axis, place) {
  if (!axis.words) return [place];
  return [...axis.words.keys()].filter((token) => axis.words[token] === place);
}

/** How much a head looks from a query to a key of the large map: summed over pieces of the key, averaged over those of the query. */
export function pairReader([query, key]) {
  const weightOf = weightReader();
  const queries = piecesOf(state.current.rows, query);
  const keys = piecesOf(state.current.columns, key);
  return (layer, head) => {
    const weights = queries.flatMap((row) => keys.map((column) => weightOf(layer, head, row, column)));
    const sum = weights.reduce((total, { weight }) => total + weight, 0);
    return { weight: sum / queries.length, about: weights.some(({ about }) => about) };
  };
}

/** The weights of the question's query and key. */
export function askedValues() {
  const read = pairReader(askedPair());
  return (layer, head) => read(layer, head).weight;
}
