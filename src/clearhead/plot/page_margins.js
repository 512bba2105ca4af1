// ---- marginals: what rows and columns come to -----------------------------------------------------------------------

import { brief, colorOf, css } from "./page_color.js";
import { byId, element, say } from "./page_data.js";
import { isSigned, state } from "./page_state.js";

export const BAR = 56;

export function drawMargins([width, height], ratio) {
  const { view, current } = state;
  const most = [current.entropy, current.received].map((values) => values.reduce((a, b) => Math.max(a, Math.abs(b)), 0));
  const shares = current.entropy.map((value) => value / most[0]);
  // A key that everything looks at would leave the others no length at all.
  const roots = current.received.map((value) => Math.sign(value) * Math.sqrt(Math.abs(value) / most[1]));
  drawBars(byId("entropy"), [BAR, height], ratio, shares.subarray(view.row, view.row + view.rows), true);
  drawBars(byId("received"), [width, BAR], ratio, roots.subarray(view.column, view.column + view.columns), false);
  const from = isSigned() ? "±" : "0 –";
  byId("entropy-title").replaceChildren(say`entropy`, element("br"), say`${from} ${brief(most[0])} nats`);
  byId("received-title").replaceChildren(say`received`, element("br"), `${from} ${brief(most[1])}`);
}

function largestPerPixel(shares, pixels) {
  const largest = new Float64Array(pixels);
  shares.forEach((share, at) => {
    const pixel = Math.floor((at * pixels) / shares.length);
    if (share > largest[pixel]) largest[pixel] = share;
  });
  return largest;
}

function drawBars(canvas, size, ratio, shares, upright) {
  [canvas.style.width, canvas.style.height] = size.map((pixels) => pixels + "px");
  [canvas.width, canvas.height] = size.map((pixels) => Math.round(pixels * ratio));
  const context = canvas.getContext("2d");
  const [along, across] = upright ? [canvas.height, canvas.width] : [canvas.width, canvas.height];
  if (shares.length > along) shares = largestPerPixel(shares, along);
  const step = along / shares.length;
  const thick = Math.max(1, step > 6 ? step - Math.round(ratio) : step);
  const plain = getComputedStyle(canvas).color;
  shares.forEach((share, place) => {
    context.fillStyle = isSigned() ? css(colorOf(Math.sign(share) * 0.5, 1)) : plain;
    const length = Math.max(1, Math.abs(share || 0) * (across - 2));
    if (upright) context.fillRect(0, place * step, length, thick);
    else context.fillRect(place * step, 0, thick, length);
  });
}
