// ---- the views of a comparison, in numbers and words ----------------------------------------------------------------

import { brief, precise, withSign } from "./page_color.js";
import { byId, data, say, unpacked } from "./page_data.js";
import { headOf, look } from "./page_grids.js";
import { valueText } from "./page_numbers.js";
import { placesOf, state, toldStatistic, viewCount, viewNumber } from "./page_state.js";

const otherViews = new Map(); // number → an item, unpacked, beside the one that is shown

export async function viewOf(number) {
  const first = state.number - viewNumber();
  for (const known of otherViews.keys()) if (known < first || known >= first + viewCount()) otherViews.delete(known);
  if (!otherViews.has(number)) otherViews.set(number, await unpacked(number));
  return otherViews.get(number);
}

const SHORT = 24; // characters

/** What one of the two is called where there is little room: its own name, or its place. */
export function shortName(view) {
  const name = data.compared.views[view];
  return name.length <= SHORT ? name : view ? say`second` : say`first`;
}

/** Where a token of one view stands in another, or null. */
export function counterpart(side, place, from, to) {
  const places = placesOf(side);
  const { rows, columns } = state.current;
  if (!places) return place < (side === "queries" ? rows : columns).names.length ? place : null;
  const index = from === 2 ? place : places[from].indexOf(place);
  return index < 0 ? null : to === 2 ? index : places[to][index];
}

export function describeChange(layer, head) {
  const { label, heads } = data.sections[state.section].layers[layer];
  const { numbers } = state.item.sections[state.section].layers[layer];
  const told = toldStatistic();
  const shown = told ? say`; ${told} changes by ${withSign(valueText(layer, head, told))}` : "";
  const change = say`mean entropy changes by ${withSign(brief(numbers.entropy[head]))} nats`;
  return say`Layer ${label}, head ${heads[head]}: divergence ${numbers.divergence[head].toFixed(3)} nats; ${change}${shown}`;
}

/** The weight in the first and in the second, beside their difference. */
export function showChange(query, key) {
  const { entropy, received } = state.current;
  const first = state.number - viewNumber();
  const texts = [0, 1].map((view) => {
    const other = otherViews.get(first + view);
    const places = ["queries", "keys"].map((side, at) => placesOf(side)[view][at ? key : query]);
    if (!other || state.current.rows.words) return "";
    const cell = look(headOf(other.bytes, other.item, state.section, state.layer, state.head), ...places);
    const weight = cell.tile === undefined ? precise(cell.weight, false) : say`in a tile of ${precise(cell.tile, false)}`;
    return `${shortName(view)} ${weight}   ·   `;
  });
  byId("details").textContent =
    texts.join("") +
    say`query ${query} · entropy ${withSign(entropy[query].toFixed(2))} nats` +
    "   ·   " +
    say`key ${key} · receives ${withSign(brief(received[key]))}`;
}
