// ---- colour ---------------------------------------------------------------------------------------------------------

import { byId, element } from "./page_data.js";
import { isSigned } from "./page_state.js";
import { isDark } from "./page_theme.js";

// One hue, lightness changing steadily: readable in grey and with every kind of colour blindness.
const LIGHT = ["#ffffff", "#dbe7ee", "#a9c8d8", "#6ea3bf", "#3a7aa3", "#1d5281", "#122c55", "#0a1230"];
const DARK = ["#171c23", "#1d2c3b", "#244660", "#2b6584", "#3f88a3", "#6aabb4", "#a9cfc6", "#f6f3dc"];
// Differences: blue below 0, brown above, lightness changing steadily to both sides.
const LIGHT_CHANGES = ["#0b2f63", "#2866a8", "#74a9d6", "#c5dcef", "#ffffff", "#f8dcb8", "#e29f4e", "#ac5c10", "#5c2a02"];
const DARK_CHANGES = ["#c9e2ff", "#7fb5ee", "#3f7fc0", "#244a73", "#171c23", "#5a3c1c", "#a8681f", "#e09a45", "#ffdcae"];
const TICKS = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
export let colors;
export let changes;
readColors();

export function readColors() {
  colors = tableOf(isDark() ? DARK : LIGHT);
  changes = tableOf(isDark() ? DARK_CHANGES : LIGHT_CHANGES);
}

function tableOf(ramp) {
  const stops = ramp.map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  const table = new Uint32Array(256);
  for (let level = 0; level < 256; level++) {
    const place = (level / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    const mix = (i) => Math.round(stops[low][i] + (stops[low + 1][i] - stops[low][i]) * (place - low));
    table[level] = ((255 << 24) | (mix(2) << 16) | (mix(1) << 8) | mix(0)) >>> 0;
  }
  return table;
}

/** The colour of a weight on a scale from 0 to `end`, or of a difference from −`end`: faint ones stay visible. */
export function colorOf(value, end, signed = isSigned()) {
  if (signed) return changes[Math.round(127.5 + 127.5 * Math.sign(value) * Math.min(1, Math.sqrt(Math.abs(value) / end)))];
  return colors[Math.min(255, Math.round(255 * Math.sqrt(value / end)))];
}

export function css(color) {
  return `rgb(${color & 255} ${(color >> 8) & 255} ${(color >> 16) & 255})`;
}

/** Black or white, whichever contrasts more (WCAG): at least 4.5 : 1 on any colour. */
export function readableOn(color) {
  const parts = [0, 8, 16].map((shift) => ((color >> shift) & 255) / 255);
  const [red, green, blue] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

export function fill(canvas, paint) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  paint(new Uint32Array(image.data.buffer));
  context.putImageData(image, 0, 0);
}

export function placesOfPixels(pixels, first, count, place) {
  return Int32Array.from({ length: pixels }, (_, pixel) => place(first + Math.floor(((pixel + 0.5) * count) / pixels)));
}

/** A printed scale: `place` says where between 0 and 1 a tick stands. */
export function drawScale(id, ticks, caption, signed = isSigned()) {
  const ramp = element("canvas", "", "ramp");
  ramp.width = 256;
  ramp.height = 1;
  fill(ramp, (pixels) => pixels.set(signed ? changes : colors));
  const labels = element("div", "", "ticks quiet");
  for (const { text, place } of ticks) {
    const label = element("span", text);
    label.style.left = 100 * place + "%";
    labels.append(label);
  }
  byId(id).replaceChildren(ramp, labels, element("p", caption, "quiet"));
}

export function weightTicks(end) {
  if (isSigned()) {
    return [-1, -0.25, -0.05, 0, 0.05, 0.25, 1].map((part) => ({
      text: (Math.abs(part) === 1 && end < 1 ? (part < 0 ? "≤ " : "≥ ") : "") + withSign(Number((part * end).toPrecision(2))),
      place: 0.5 + 0.5 * Math.sign(part) * Math.sqrt(Math.abs(part)),
    }));
  }
  return TICKS.map((part) => ({
    text: (part === 1 && end < 1 ? "≥ " : "") + Number((part * end).toPrecision(2)),
    place: Math.sqrt(part),
  }));
}

export function evenTicks(low, high) {
  return [0, 0.25, 0.5, 0.75, 1].map((place) => ({ text: brief(low + (high - low) * place), place }));
}

export function brief(value) {
  return Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function withSign(number) {
  return String(number).startsWith("-") ? "−" + String(number).slice(1) : (Number(number) ? "+" : "") + number;
}

/** A weight, with the same digits all over the page. */
export function precise(weight, signed = isSigned()) {
  if (Math.abs(weight) >= 0.00005) return signed ? withSign(weight.toFixed(4)) : weight.toFixed(4);
  return signed ? "± 0" : "< 0.0001";
}
