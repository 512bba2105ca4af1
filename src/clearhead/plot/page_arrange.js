// ---- the order of all heads -----------------------------------------------------------------------------------------

import { byId, data, option, say } from "./page_data.js";
import { valueOf } from "./page_numbers.js";
import { allHeads, askedPair, columnCount, eachHead, isSigned, state } from "./page_state.js";
import { askedValues } from "./page_weights.js";

// A row of the overview has a name and heads, each as places of its layer and of the head in it.

const LEAST_COLUMNS = 6;
const ORDERS = { layers: say`by layer`, kinds: say`by what they look at`, asked: say`by the weight asked for` };

/** Heads stand by layer too while there is no question that they could be ordered by. */
export function isByLayer() {
  return state.order === "layers" || (state.order === "asked" && askedPair()[1] === null);
}

export function arranged() {
  const { layers } = data.sections[state.section];
  if (isByLayer()) {
    return layers.map((layer, index) => ({ name: layer.label, title: layer.name, heads: layer.heads.map((_, head) => [index, head]) }));
  }
  if (state.order === "kinds") return grouped();
  const value = state.order === "asked" ? askedValues() : (layer, head) => valueOf(layer, head, state.order) ?? -Infinity;
  const size = isSigned() ? Math.abs : (number) => number;
  const heads = allHeads().sort((a, b) => size(value(...b)) - size(value(...a)));
  return rowsOf(heads);
}

/** One heading per kind of head, the most frequent kind first, and rows of its heads below it. */
function grouped() {
  const kinds = new Map();
  eachHead((layer, head) => {
    const kind = state.item.sections[state.section].layers[layer].kinds[head];
    if (!kinds.has(kind)) kinds.set(kind, []);
    kinds.get(kind).push([layer, head]);
  });
  return [...kinds]
    .sort((a, b) => b[1].length - a[1].length)
    .flatMap(([kind, heads]) => {
      const count = heads.length === 1 ? say`1 head` : say`${heads.length} heads`;
      return [{ heading: `${kind} · ${count}`, heads: [] }, ...rowsOf(heads)];
    });
}

/** Heads in rows of equal length, named by the rank of their first head. */
function rowsOf(heads) {
  const columns = Math.max(LEAST_COLUMNS, columnCount());
  const rows = [];
  for (let first = 0; first < heads.length; first += columns) {
    rows.push({ name: String(first + 1), title: say`rank`, heads: heads.slice(first, first + columns) });
  }
  return rows;
}

/** The orders there are: layers, kinds, the weight asked for, and every statistic. */
export function buildOrders() {
  const orders = Object.entries(ORDERS).filter(([name]) => name !== "kinds" || !isSigned());
  const { statistics } = data.sections[state.section];
  const names = [...orders, ...statistics.map((name) => [name, say`by ${name}`])];
  if (!names.some(([name]) => name === state.order)) state.order = "layers";
  byId("order").replaceChildren(...names.map(([name, text]) => option(name, text, name === state.order)));
}
