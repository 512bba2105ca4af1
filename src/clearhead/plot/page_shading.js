// ---- what one token looks at: in the text, as a list, and as a sum --------------------------------------------------

import { colorOf, colors, css, precise, readableOn } from "./page_color.js";
import { byId, element, say } from "./page_data.js";
import { hints } from "./page_finding.js";
import { mostOf, spanSum, weightAt } from "./page_grids.js";
import { numbered, quoted } from "./page_names.js";
import { drawHeads } from "./page_overview.js";
import { evenWeights, multipleColor, outlinePatch, paintOver } from "./page_picture.js";
import { differing, isSame, isSigned, patchesOf, scaleEnds, state } from "./page_state.js";

let shaded = {};
export const textBoxes = new Map(); // side → the box and its tokens

/** Forget the texts before others are built. */
export function forgetTexts() {
  shaded = {};
  textBoxes.clear();
}

export function textOf(side) {
  return textBoxes.get(side) || textBoxes.get("both");
}

/** What colours the keys of a row: its weights as far as they are known one by one, else its tiles. */
function shadesOf(query) {
  const { columns, grids, listed, complete } = state.current;
  const { cellEnd, tileEnd } = scaleEnds();
  const even = evenWeights();
  const none = even ? colors[0] : colorOf(0, cellEnd);
  const shades = new Map();
  if (complete) {
    for (let key = 0; key < columns.names.length; key++) {
      const weight = weightAt(grids[0], query, key);
      const color = even ? multipleColor(weight, even.weights[key], even.end) : colorOf(weight, cellEnd);
      if (color !== none) shades.set(key, color);
    }
  } else {
    const end = listed ? cellEnd : tileEnd;
    for (const { keys, weight } of mostOf(query).filter(({ weight }) => weight)) {
      for (let key = keys[0]; key <= keys[1]; key++) shades.set(key, colorOf(weight, end));
    }
  }
  return shades;
}

/** Colour the text; of a long one only what changes. */
export function shadeText(query) {
  const key = patchesOf() ? state.shown.key : null; // which is outlined in a picture only
  if (shaded.head === state.current && shaded.query === query && shaded.key === key && shaded.colors === colors) return;
  if (patchesOf()) shadePicture(query);
  const shades = shadesOf(query);
  const tokens = textOf("keys")?.tokens ?? []; // patches of a picture are none
  for (const key of (shaded.shades || new Map()).keys()) {
    if (!shades.has(key) && tokens[key]) tokens[key].style.background = tokens[key].style.color = "";
  }
  for (const [key, color] of shades) {
    if (!tokens[key] || shaded.shades?.get(key) === color) continue;
    tokens[key].style.background = css(color);
    tokens[key].style.color = readableOn(color);
  }
  shaded = { head: state.current, query, key, colors, shades };
  markToken(textOf("queries"), query);
}

function shadePicture(query) {
  const canvas = document.querySelector(".picture .over");
  const { grids, columns } = state.current;
  paintOver(canvas, columns.names.map((_, key) => weightAt(grids[0], query, key)));
  const { prefix } = patchesOf();
  const looking = isSame() ? query : state.shown.key;
  if (looking !== null && looking >= prefix) outlinePatch(canvas, looking - prefix);
  if (state.statistic === "maps") drawHeads();
}

function markToken(text, place) {
  if (!text) return;
  const { box, tokens } = text;
  tokens[text.query]?.classList.remove("query");
  text.query = place;
  const mark = tokens[place];
  if (!mark) return; // a patch of a picture
  mark.classList.add("query");
  // Twice: parts of a long text that come into view may turn out longer or shorter than was expected.
  if (scrollTo(box, mark)) scrollTo(box, mark);
}

function scrollTo(box, mark) {
  const [outer, inner] = [box.getBoundingClientRect(), mark.getBoundingClientRect()];
  const top = inner.top - outer.top; // within the box
  const outside = top < 0 || top + inner.height > box.clientHeight;
  if (outside) box.scrollTop += top - 40;
  return outside;
}

function markSpan() {
  const text = textOf("keys");
  if (!text) return;
  const [before, after] = [text.span, (state.span && state.span.columns) || null];
  const within = (range, key) => Boolean(range) && key >= range[0] && key <= range[1];
  for (const range of [before, after]) {
    if (!range) continue;
    for (let key = range[0]; key <= Math.min(range[1], text.tokens.length - 1); key++) {
      if (within(before, key) !== within(after, key)) text.tokens[key].classList.toggle("selected", within(after, key));
    }
  }
  text.span = after;
}

export function showList(query) {
  const { rows, columns } = state.current;
  const marks = differing("keys");
  const name = element("b", rows.names[query]);
  byId("list-title").replaceChildren(...(isSigned() ? [say`where `, name, say` changes most`] : [say`what `, name, say` looks at most`]));
  byId("list").replaceChildren(
    ...mostOf(query).map(({ keys, weight }) => listItem(keys[0] === keys[1] ? numbered(columns.names, keys[0]) : quoted(columns.names, keys), weight, keys[0] === keys[1] && marks.has(keys[0]))),
  );
}

function listItem(name, weight, differs = false) {
  const item = element("li");
  const bar = element("span", "", "bar");
  const filled = document.createElement("i");
  filled.style.width = Math.min(100, 100 * Math.abs(weight)) + "%";
  if (isSigned()) filled.style.background = css(colorOf(Math.sign(weight) * 0.5, 1));
  bar.append(filled);
  item.append(element("span", name, differs ? "differs" : ""), element("span", precise(weight), "weight"), bar);
  return item;
}

export function showSum() {
  byId("sum-zoom").hidden = byId("sum-clear").hidden = !state.span;
  byId("sum").classList.toggle("quiet", !state.span);
  markSpan();
  if (!state.span) {
    byId("sum-text").textContent = hints.sum;
    return;
  }
  const rows = state.span.rows || [state.query, state.query];
  const { columns } = state.span;
  const counts = [rows, columns].map(([first, last]) => last - first + 1);
  const total = spanSum(state.current, rows, columns);
  const value = total ? (total.exact ? total.sum.toFixed(4) : say`about ${total.sum.toFixed(4)}`) : say`unknown (tiles hold largest weights):`;
  const over = counts[0] > 1 ? say`, mean over ${counts[0]} queries` : "";
  byId("sum-text").replaceChildren(
    element("b", value, "weight"),
    counts[1] > 1 ? say` sum of ${counts[1]} keys${over}: ` : say` sum of 1 key${over}: `,
    element("b", quoted(state.current.rows.names, rows)),
    " → ",
    element("b", quoted(state.current.columns.names, columns)),
  );
}
