// ---- a picture in place of a text: its pixels, and the weights over them --------------------------------------------

import { colors, drawScale, fill, placesOfPixels, precise } from "./page_color.js";
import { byId, decoded, element, say } from "./page_data.js";
import { leavesOutSpecial, rowOfTiles } from "./page_grids.js";
import { patchesOf, scaleEnds, specialKeys, state } from "./page_state.js";
import { isDark } from "./page_theme.js";

const PICTURE_LEFT = 0.4; // how much of the picture's contrast shows through the weights
const MULTIPLES = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]; // where the colour scale may end
let pixelsShown = null;

/** The picture as three planes of bytes, and in grey, so that no colour of its own is taken for a weight. */
function picturePixels() {
  if (!pixelsShown || pixelsShown.item !== state.item) {
    const planes = decoded(state.bytes, state.item.picture.pixels);
    const size = planes.length / 3;
    const grey = planes.subarray(0, size).map((red, at) => 0.299 * red + 0.587 * planes[size + at] + 0.114 * planes[2 * size + at]);
    pixelsShown = { item: state.item, planes, grey };
  }
  return pixelsShown;
}

/** The weight of every key if all were alike, and where the colour scale ends as a multiple of it; nothing for a text. */
export function evenWeights() {
  if (!patchesOf()) return null;
  const { prefix, grid, cell, side } = patchesOf();
  const patches = state.item.picture.size.map((pixels, axis) => Math.floor(pixels / (cell[axis] / side)));
  const covered = (at, axis) => Math.min(side, patches[axis] - at * side);
  const counts = new Float64Array(prefix + grid[0] * grid[1]).fill(1);
  for (let at = 0; at < grid[0] * grid[1]; at++) {
    counts[prefix + at] = covered(Math.floor(at / grid[1]), 0) * covered(at % grid[1], 1);
  }
  if (leavesOutSpecial()) for (const key of specialKeys()) counts[key] = 0;
  const total = counts.reduce((sum, count) => sum + count, 0);
  const most = scaleEnds().cellEnd * total;
  return { total, weights: counts.map((count) => count / total), end: MULTIPLES.find((end) => end >= most) ?? MULTIPLES.at(-1) };
}

/** Whether a query's largest weight is no more than the even weight, in the digits that the page holds. */
export function looksEvenly(query) {
  const [most] = state.current.largest(query);
  if (!patchesOf() || !most) return false;
  const even = evenWeights().weights[most.key];
  const layer = state.item.sections[state.section].layers[state.layer];
  const [law, , levels] = (layer.finer[state.head] ?? layer).weights;
  const rooted = law === "root";
  const level = Math.round(levels * (rooted ? Math.sqrt(even) : even)) / levels;
  return most.weight <= (state.current.renormalised ? even : rooted ? level ** 2 : level) + 1e-9;
}

/** Blank up to the even weight, and then after the logarithm of its multiple, so that an even head is blank. */
export function multipleColor(weight, even, end) {
  return colors[Math.round(255 * Math.min(1, Math.log(Math.max(1, even ? weight / even : 1)) / Math.log(end)))];
}

export function drawPictureScale(id) {
  const { total, weights, end } = evenWeights();
  const every = [1, 2, ...MULTIPLES.filter((each) => each <= end)];
  const step = Math.ceil(every.length / 6);
  const ticks = every.filter((_, at) => (every.length - 1 - at) % step === 0 || at === 0);
  const { side } = patchesOf();
  const what = side > 1 ? say`${side} × ${side} patches` : say`a patch`;
  drawScale(
    id,
    ticks.map((each) => ({ text: `${each === end ? "≥ " : ""}${each}×`, place: Math.log(each) / Math.log(end) })),
    say`weight of ${what} in the query’s row; 1× is the even weight, ${side > 1 ? side * side : 1}/${total}; colour follows the logarithm`,
  );
  const blank = say`Blank patches get no more than the even weight, ${precise(weights[patchesOf().prefix])}.`;
  if (id === "map-scale") byId(id).append(element("p", blank, "quiet"));
}

function fillEach(canvas, colorAt) {
  fill(canvas, (pixels) => {
    for (let at = 0; at < pixels.length; at++) pixels[at] = colorAt(at);
  });
}

export function drawPlain() {
  const [height, width] = state.item.picture.size;
  const { planes } = picturePixels();
  const canvas = document.querySelector(".picture .plain");
  fillEach(canvas, (at) => {
    const y = Math.floor((Math.floor(at / canvas.width) * height) / canvas.height);
    const x = Math.floor(((at % canvas.width) * width) / canvas.width);
    const place = y * width + x;
    const [red, green, blue] = [0, 1, 2].map((plane) => planes[plane * height * width + place]);
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  });
}

/** The weights of a row over the picture: multiplied into it on light paper, added to it on dark. */
export function paintOver(canvas, weights) {
  const { prefix, grid, cell } = patchesOf();
  const [height, width] = state.item.picture.size;
  const { grey } = picturePixels();
  const even = evenWeights();
  const shades = Array.from({ length: grid[0] * grid[1] }, (_, at) => multipleColor(weights[prefix + at], even.weights[prefix + at], even.end));
  const none = colors[0];
  const rows = placesOfPixels(canvas.height, 0, height, (line) => line);
  const columns = placesOfPixels(canvas.width, 0, width, (line) => line);
  fillEach(canvas, (at) => {
    const line = rows[Math.floor(at / canvas.width)];
    const across = columns[at % canvas.width];
    const [row, column] = [Math.floor(line / cell[0]), Math.floor(across / cell[1])];
    const shade = row < grid[0] && column < grid[1] ? shades[row * grid[1] + column] : none;
    let color = 255 << 24;
    const pixel = grey[line * width + across];
    for (let plane = 0; plane < 3; plane++) {
      const over = (shade >> (8 * plane)) & 255;
      const mixed = isDark()
        ? 255 - ((255 - pixel * PICTURE_LEFT) * (255 - over)) / 255
        : ((255 - (255 - pixel) * PICTURE_LEFT) * over) / 255;
      color |= Math.round(mixed) << (8 * plane);
    }
    return color >>> 0;
  });
}

export function outlinePatch(canvas, patch) {
  const { grid, cell } = patchesOf();
  const [height, width] = state.item.picture.size;
  const [down, across] = [(canvas.height / height) * cell[0], (canvas.width / width) * cell[1]];
  const context = canvas.getContext("2d");
  context.lineWidth = 2 * (devicePixelRatio || 1);
  context.strokeStyle = getComputedStyle(canvas).color;
  context.strokeRect((patch % grid[1]) * across, Math.floor(patch / grid[1]) * down, across, down);
}

/** A head's thumbnail of at most `most` pixels: what the token that is shown looks at. */
export function drawPictureThumbnail(canvas, layer, head, most) {
  const [height, width] = state.item.picture.size;
  const scale = most / Math.max(height, width);
  [canvas.width, canvas.height] = [width, height].map((pixels) => Math.max(1, Math.round(pixels * scale)));
  const packed = state.item.sections[state.section].layers[layer];
  paintOver(canvas, rowOfTiles(state.bytes, packed, head, state.shown.query));
}
