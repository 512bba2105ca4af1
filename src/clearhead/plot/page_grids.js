// ---- one head as numbers --------------------------------------------------------------------------------------------

import { data, decoded } from "./page_data.js";
import { isSigned, specialKeys, state } from "./page_state.js";

// A grid is a matrix of weights and which of its rows and columns a query and a key belong to (−1: none). A head has
// one or two: every weight where they are there, and tiles.

export function headOf(bytes, item, section, layer, head) {
  const picture = item.sections[section];
  const texts = [item.texts[picture.queries], item.texts[picture.keys]];
  const packed = picture.layers[layer];
  const [rows, columns] = texts.map((text) => ({ names: text.names, words: null }));
  // A chosen head has finer numbers where the others are pooled.
  const finer = packed.finer[head];
  const source = finer || packed;
  const place = finer ? 0 : head;
  const grids = [tiles(bytes, { ...packed, ...finer }, place, data.sections[section].pooling)];
  grids[0].finer = Boolean(finer);
  const crop = packed.crops[head];
  if (crop) grids.unshift(cropped(bytes, crop));
  const complete = grids[0].exact && covers(grids[0], rows.names.length, columns.names.length);
  const part = (what, names, bins) => spread(decoded(bytes, source[what], place * bins, bins), names.length);
  const bins = finer ? [rows.names.length, columns.names.length] : packed.bins;
  const result = {
    rows,
    columns,
    grids,
    complete,
    pooled: bins[0] < rows.names.length || bins[1] < columns.names.length,
    entropy: part("entropy", rows.names, bins[0]),
    received: part("received", columns.names, bins[1]).map((share) => share * rows.names.length),
    largest: source.count ? largestOf(bytes, source, place, rows.names.length) : null,
  };
  if (!result.largest) result.largest = complete ? (query) => largestOfRow(result, query) : () => [];
  result.listed = complete || source.count > 0;
  const pieces = texts.some((text) => text.words);
  const entropyOfWords = () => wordEntropy(bytes, packed, head);
  result.words = pieces && complete ? (whose = result) => merged(whose, texts, whose === result ? entropyOfWords() : null) : null;
  return result;
}

/** Where a layer's tiles lie: which row of tiles a query belongs to, and where a row begins. */
export function tiling(layer) {
  const [rows, columns] = layer.grid;
  const [length, keys] = layer.size;
  const [firstQuery, firstKey] = layer.origin;
  const exact = rows === length && columns === keys;
  return {
    rows,
    columns,
    exact,
    rounded: exact && layer.map[0] === "root",
    row: (query) => Math.floor(((query + firstQuery) * rows) / length),
    column: (key) => Math.floor(((key + firstKey) * columns) / keys),
    rowStart: (row) => Math.ceil((row * length) / rows) - firstQuery,
    columnStart: (column) => Math.ceil((column * keys) / columns) - firstKey,
  };
}

/** Whether special tokens are left out of all heads, which needs every weight of them. */
export function leavesOutSpecial() {
  return state.special && !isSigned() && state.item.sections[state.section].layers.every((layer) => tiling(layer).exact);
}

export function tiles(bytes, layer, head, pooling) {
  const size = layer.grid[0] * layer.grid[1];
  return { ...tiling(layer), pooling, values: decoded(bytes, layer.map, head * size, size) };
}

/** One row of a layer's tiles, without special tokens if they are left out. */
export function rowOfTiles(bytes, layer, head, query) {
  const grid = tiling(layer);
  const row = decoded(bytes, layer.map, (head * grid.rows + grid.row(query)) * grid.columns, grid.columns);
  if (leavesOutSpecial()) renormalise(row, specialKeys().map(grid.column));
  return row;
}

function cropped(bytes, crop) {
  const [top, bottom] = crop.queries;
  const [left, right] = crop.keys;
  return {
    rows: bottom - top,
    columns: right - left,
    exact: true,
    values: decoded(bytes, crop.weights),
    row: (query) => (query >= top && query < bottom ? query - top : -1),
    column: (key) => (key >= left && key < right ? key - left : -1),
    rowStart: (row) => row + top,
    columnStart: (column) => column + left,
  };
}

function covers(grid, rows, columns) {
  return [0, rows - 1].every((query) => grid.row(query) >= 0) && [0, columns - 1].every((key) => grid.column(key) >= 0);
}

/** Number ⌊i·bins/n⌋ of the bins for each of n tokens. */
function spread(numbers, count) {
  if (numbers.length === count) return numbers;
  return Float64Array.from({ length: count }, (_, at) => numbers[Math.floor((at * numbers.length) / count)]);
}

function largestOf(bytes, layer, head, queries) {
  const { count } = layer;
  return (query) => {
    const from = (head * queries + query) * count;
    const weights = decoded(bytes, layer.weights, from, count);
    return [...decoded(bytes, layer.indices, from, count)]
      .map((key, place) => ({ key, weight: weights[place] }))
      .filter(({ key }) => key >= 0);
  };
}

function wordEntropy(bytes, layer, head) {
  const crop = layer.crops[head];
  if (crop) return decoded(bytes, crop.wordEntropy);
  if (!layer.wordEntropy) return null;
  const length = layer.wordEntropy.at(-1);
  const count = length / (data.sections[state.section].layers[state.layer].heads.length);
  return decoded(bytes, layer.wordEntropy, head * count, count);
}

/** The head between words: the weights of a word's pieces added up as keys, averaged as queries. */
function merged(head, texts, entropy) {
  const [rows, columns] = texts.map((text) => ({
    names: text.wordNames || text.names,
    words: text.words || text.names.map((_, place) => place),
  }));
  const height = rows.names.length;
  const width = columns.names.length;
  const values = new Float64Array(height * width);
  const pieces = new Float64Array(height);
  rows.words.forEach((word) => pieces[word]++);
  rows.words.forEach((row, query) =>
    columns.words.forEach((column, key) => {
      values[row * width + column] += weightAt(head.grids[0], query, key) / pieces[row];
    }),
  );
  return { ...exactHead(rows, columns, values, entropy), renormalised: head.renormalised };
}

/** The head without its special keys: every row is divided by the weight of its other keys. */
export function withoutSpecial(head, special) {
  const { rows, columns } = head;
  const width = columns.names.length;
  const values = new Float64Array(rows.names.length * width);
  rows.names.forEach((_, query) => {
    const row = values.subarray(query * width, (query + 1) * width);
    for (let key = 0; key < width; key++) row[key] = weightAt(head.grids[0], query, key);
    renormalise(row, special);
  });
  const result = { ...exactHead(rows, columns, values), renormalised: true };
  if (head.words) result.words = () => head.words(result);
  return result;
}

/** Set a row's special keys to 0, and divide its other weights by their sum. */
export function renormalise(row, special) {
  for (const key of special) row[key] = 0;
  let left = 0;
  for (let key = 0; key < row.length; key++) left += row[key];
  for (let key = 0; left > 0 && key < row.length; key++) row[key] /= left;
}

/** A head between texts of which every weight is known. */
function exactHead(rows, columns, values, entropy = null) {
  const [height, width] = [rows.names.length, columns.names.length];
  const same = (index) => index;
  const grid = { rows: height, columns: width, exact: true, values, row: same, column: same, rowStart: same, columnStart: same };
  const received = new Float64Array(width);
  values.forEach((value, at) => (received[at % width] += value));
  const result = { rows, columns, grids: [grid], complete: true, pooled: false, listed: true, received, words: null };
  result.entropy = entropy || Float64Array.from({ length: height }, (_, row) => entropyOf(values, row * width, width));
  result.largest = (query) => largestOfRow(result, query);
  return result;
}

function entropyOf(values, first, count) {
  let sum = 0;
  for (let at = first; at < first + count; at++) if (values[at] > 0) sum -= values[at] * Math.log(values[at]);
  return sum;
}

/** The largest weights of a row of which every weight is known. */
function largestOfRow(head, query) {
  return mostOfAll([...head.columns.names.keys()].map((key) => ({ key, weight: weightAt(head.grids[0], query, key) })));
}

function mostOfAll(weights) {
  return weights.sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).slice(0, 8);
}

/** The tiles that a query's row of tiles has most in: first and last key, and the tile's weight. */
export function largestTiles(head, query) {
  const grid = head.grids.at(-1);
  const row = grid.row(query) * grid.columns;
  return mostOfAll(Array.from({ length: grid.columns }, (_, column) => ({ column, weight: grid.values[row + column] })))
    .filter(({ weight }) => weight)
    .map(({ column, weight }) => ({ keys: keysOfTile(head, column), weight }))
    .filter(({ keys }) => keys[0] <= keys[1]);
}

/** What a query looks at most: single keys as far as they are known, else tiles; each from a first to a last key. */
export function mostOf(query) {
  const { listed, largest } = state.current;
  if (!listed) return largestTiles(state.current, query);
  return largest(query).map(({ key, weight }) => ({ keys: [key, key], weight }));
}

function keysOfTile(head, column) {
  const grid = head.grids.at(-1);
  return [Math.max(0, grid.columnStart(column)), Math.min(head.columns.names.length, grid.columnStart(column + 1)) - 1];
}

export function weightAt(grid, query, key) {
  return grid.values[grid.row(query) * grid.columns + grid.column(key)];
}

function gridAt(head, query, key) {
  return head.grids.find((grid) => grid.row(query) >= 0 && grid.column(key) >= 0);
}

/** What is known about one weight: itself, or the tile it lies in. */
export function look(head, query, key) {
  const grid = gridAt(head, query, key);
  if (grid.exact && !grid.rounded) return { weight: weightAt(grid, query, key) };
  const listed = head.largest(query).find((entry) => entry.key === key);
  if (listed) return { weight: listed.weight };
  if (grid.exact) return { weight: weightAt(grid, query, key), rounded: true };
  const [row, column] = [grid.row(query), grid.column(key)];
  const [rows, columns] = [head.rows.names.length, head.columns.names.length];
  return {
    tile: weightAt(grid, query, key),
    pooling: grid.pooling,
    queries: [Math.max(0, grid.rowStart(row)), Math.min(rows, grid.rowStart(row + 1)) - 1],
    keys: [Math.max(0, grid.columnStart(column)), Math.min(columns, grid.columnStart(column + 1)) - 1],
  };
}

/** Σ over keys, averaged over queries; from tiles only about. */
export function spanSum(head, [top, bottom], [left, right]) {
  const corners = [[top, left], [bottom, right]].map(([query, key]) => gridAt(head, query, key));
  const grid = corners[0] === corners[1] ? corners[0] : head.grids[head.grids.length - 1];
  if (!grid.exact && grid.pooling !== "mass") return null;
  const rows = overlaps(top, bottom, grid.row, () => 1);
  const columns = overlaps(left, right, grid.column, (column) => grid.columnStart(column + 1) - grid.columnStart(column));
  let sum = 0;
  for (const [row, rowShare] of rows) {
    for (const [column, columnShare] of columns) sum += rowShare * columnShare * grid.values[row * grid.columns + column];
  }
  return { sum: sum / (bottom - top + 1), exact: grid.exact };
}

function overlaps(first, last, place, size) {
  const shares = new Map();
  for (let index = first; index <= last; index++) {
    const at = place(index);
    shares.set(at, (shares.get(at) || 0) + 1 / size(at));
  }
  return shares;
}
