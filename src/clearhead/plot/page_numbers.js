// ---- all heads as numbers, and what thumbnails are painted with -----------------------------------------------------

import { brief, colorOf, drawScale, evenTicks, fill } from "./page_color.js";
import { data, say } from "./page_data.js";
import { leavesOutSpecial, renormalise, tiles } from "./page_grids.js";
import { allHeads, isSigned, scaleEnds, state } from "./page_state.js";

export function scaleCaption(layer, renormalised) {
  const [rows, columns] = layer.size.map((size, side) => size / layer.grid[side]);
  const end = (renormalised ? say`, special tokens left out` : "") + say`; colour follows its square root`;
  if (isSigned()) {
    const tile = rows === 1 && columns === 1 ? say`a weight` : say`a tile of ${Math.ceil(rows)} × ${Math.ceil(columns)} tokens`;
    return say`change of ${tile}, second − first` + end;
  }
  if (rows === 1 && columns === 1) return say`weight of a key in its query’s row` + end;
  const [down, across] = [Math.ceil(rows), Math.ceil(columns)];
  if (data.sections[state.section].pooling === "max") return say`largest weight in a tile of ${down} × ${across} tokens` + end;
  return say`weight of a tile: of ${across} keys together, averaged over ${down} queries` + end;
}

/** Draw a head of an item whose numbers are `bytes`, pooled by its largest weights to at most `most` pixels. */
export function paintHead(canvas, { bytes, item }, layer, head, most) {
  const text = item.sections[state.section];
  const packed = text.layers[layer];
  const grid = tiles(bytes, packed, head, "");
  const sizes = [text.queries, text.keys].map((number) => item.texts[number].names.length);
  if (leavesOutSpecial() && !packed.signed) {
    const special = item.texts[text.keys].special.map(grid.column);
    for (let row = 0; row < grid.rows; row++) renormalise(grid.values.subarray(row * grid.columns, (row + 1) * grid.columns), special);
  }
  const [top, left] = [grid.row(0), grid.column(0)];
  const [rows, columns] = [grid.row(sizes[0] - 1) - top + 1, grid.column(sizes[1] - 1) - left + 1];
  canvas.height = Math.min(rows, most);
  canvas.width = Math.min(columns, most);
  const largest = new Float64Array(canvas.height * canvas.width);
  const across = Int32Array.from({ length: columns }, (_, column) => Math.floor((column * canvas.width) / columns));
  const { width } = canvas;
  for (let row = 0; row < rows; row++) {
    const line = Math.floor((row * canvas.height) / rows) * width;
    for (let column = 0; column < columns; column++) {
      const place = line + across[column];
      const value = grid.values[(row + top) * grid.columns + column + left];
      if (Math.abs(value) > Math.abs(largest[place])) largest[place] = value;
    }
  }
  const { tileEnd } = scaleEnds(packed.signed);
  fill(canvas, (pixels) => largest.forEach((value, at) => (pixels[at] = colorOf(value, tileEnd, packed.signed))));
}

export function valueOf(layer, head, statistic = state.statistic) {
  return state.item.sections[state.section].layers[layer].numbers[statistic][head];
}

export function valueText(layer, head, statistic = state.statistic) {
  const value = valueOf(layer, head, statistic);
  return value === null ? say`none` : brief(value);
}

/** The least and the largest number of all heads; of changes the same to both sides. */
export function numberRange() {
  const finite = allHeads().map(([layer, head]) => valueOf(layer, head)).filter((value) => value !== null);
  const most = Math.max(...finite.map(Math.abs));
  return isSigned() ? [-most, most] : [Math.min(...finite), Math.max(...finite)];
}

export function drawNumberScale() {
  const unit = ["entropy", "divergence"].includes(state.statistic) ? say` in nats` : "";
  const caption = isSigned()
    ? say`change of ${state.statistic}${unit}, one number per head`
    : say`${state.statistic}${unit}, one number per head`;
  drawScale("overview-scale", evenTicks(...numberRange()), caption);
}
