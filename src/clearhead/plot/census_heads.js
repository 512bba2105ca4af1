// ---- the heads of a census: their names, their metrics and the colours of both --------------------------------------

import { colorOf, colors } from "./page_color.js";
import { data, say } from "./page_data.js";

const FIRST_SHADE = 0.45; // of the colours that contrast with the paper

export const layerCount = Math.max(...data.heads.map(({ layer }) => layer)) + 1;

export function nameOfHead({ layer, head }) {
  return say`layer ${layer}, head ${head}`;
}

export function valueOf(head, metric) {
  return head.values[data.metrics.findIndex(({ name }) => name === metric)];
}

export function meaningOf(metric) {
  return data.metrics.find(({ name }) => name === metric).meaning;
}

/** The heads of a layer, as places. */
export function headsOf(layer) {
  return [...data.heads.keys()].filter((at) => data.heads[at].layer === layer);
}

/** The range of a metric. That of a mass begins at 0 and holds the mean that names a head. */
export function rangeOf(metric) {
  const known = data.heads.map((head) => valueOf(head, metric)).filter((value) => value !== null);
  if (metric in data.least) return [0, Math.max(data.least[metric] + 0.1, ...known)];
  const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}

/** The colour of a number in the grid: weights as on the page of all weights, anything else evenly. */
export function colorOfValue(value, metric) {
  if (value === null) return colors[0];
  if (metric in data.least) return colorOf(value, 1);
  const [low, high] = rangeOf(metric);
  return colors[Math.round((255 * (value - low)) / (high - low))];
}

/** Later layers stand out more from the paper. */
export function colorOfLayer(layer) {
  const share = layerCount > 1 ? layer / (layerCount - 1) : 1;
  return colors[Math.round(255 * (FIRST_SHADE + (1 - FIRST_SHADE) * share))];
}
