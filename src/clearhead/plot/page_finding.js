// ---- in words: the finding, what is under the pointer, and hints ----------------------------------------------------

import { brief, precise } from "./page_color.js";
import { showChange } from "./page_compared.js";
import { byId, data, element, say } from "./page_data.js";
import { largestTiles, look } from "./page_grids.js";
import { quoted } from "./page_names.js";
import { looksEvenly } from "./page_picture.js";
import { headName, isSame, isSigned, patchesOf, state, viewCount } from "./page_state.js";

export const hints = { query: say`Shading shows the outlined word’s weights. Click another.`, head: "", sum: say`Drag over the map or the text to add up weights.` };

/** What a query's row says: a verb, an object and a weight; of one key, or of the largest weight. */
function sayingOf(query, key) {
  const { columns, listed, largest } = state.current;
  const tile = key === null && !listed ? largestTiles(state.current, query)[0] : null;
  if (tile) {
    const weight = say`${precise(tile.weight)} (keys ${tile.keys[0]}–${tile.keys[1]})`;
    return { verb: say` and its neighbours look most at `, object: quoted(columns.names, tile.keys), weight, key: tile.keys[0], isMany: true };
  }
  const at = key ?? largest(query)[0]?.key;
  if (at === undefined) return null;
  const cell = look(state.current, query, at);
  const weight = cell.tile === undefined ? (cell.rounded ? say`about ${precise(cell.weight)}` : precise(cell.weight)) : tileText(cell);
  if (key === null && looksEvenly(query)) {
    return { verb: say` looks at `, object: say`all patches about alike`, weight: say`at most ${weight}`, key: at, isMany: true };
  }
  const most = isSigned() ? say` changes most at ` : say` looks most at `;
  return { verb: key === null ? most : null, object: columns.names[at], weight, key: at };
}

function tileText({ tile, pooling, keys }) {
  const across = keys[1] - keys[0] + 1;
  if (pooling === "max") return say`at most ${precise(tile)} (the largest weight of its tile)`;
  return say`about ${precise(tile / across)} (its tile, keys ${keys[0]}–${keys[1]}, has ${precise(tile)})`;
}

export function showReadout(query, key) {
  const name = element("b", state.current.rows.names[query]);
  const said = sayingOf(query, key);
  if (!said) {
    byId("readout").replaceChildren(name, say` sees nothing`);
    byId("details").textContent = "";
    return;
  }
  const isFinding = query === state.query && key === state.key; // which stands in words above
  const verb = (isFinding && !said.isMany ? null : said.verb) ?? " → ";
  byId("readout").replaceChildren(name, verb, element("b", said.object), " ", element("span", said.weight, "weight"));
  showDetails(query, said.key);
}

/** The sentence above everything: the chosen head, and what the chosen token looks at. */
export function showFinding() {
  const name = element("strong", state.current.rows.names[state.query]);
  const said = sayingOf(state.query, state.key);
  const rest = said
    ? [said.verb ?? (isSigned() ? say` changes at ` : say` looks at `), element("strong", said.object), ` (${said.weight})`]
    : [say` sees nothing`];
  byId("finding").replaceChildren(say`In ${headName(state.layer, state.head)}, `, name, ...rest);
  byId("reason").textContent = reason();
}

/** What this head does, and why it is worth a look, where that is so. */
function reason() {
  if (isSigned()) return say`The colours show second − first: blue is less weight, brown is more.`;
  const { clearest, layers } = state.item.sections[state.section];
  const kind = layers[state.layer].kinds[state.head];
  if (!clearest) return say`No head stands out: all of them look everywhere about alike.`;
  const does = data.items.length > viewCount() ? say`In this text, this head ${looksAt(kind)}. ` : say`This head ${looksAt(kind)}. `;
  return clearest[0] === state.layer && clearest[1] === state.head ? does + standsOut() : does;
}

/** A head's kind as a verb and its object. */
export function looksAt(kind) {
  const isSpread = [say`several places`, say`everything about alike`].includes(kind);
  const counted = state.special ? say` (all tokens counted)` : "";
  return (isSpread ? say`looks at ${kind}` : say`looks mostly at ${kind}`) + counted;
}

function standsOut() {
  if (patchesOf()) return say`Shown because ${comparedRow()} looks most at few patches.`;
  const [most] = state.current.largest(state.query);
  const isFar = isSame() && most && Math.abs(most.key - state.query) > 1;
  if (!isFar) return say`Shown because different words clearly look at different words.`;
  return say`Shown because it clearly links distant words.`;
}

/** The row of an image that heads are compared by. */
function comparedRow() {
  const { prefix } = patchesOf();
  return prefix && isSame() ? say`the ${state.current.rows.names[0]} token` : isSame() ? say`a patch, on average,` : state.current.rows.names[0];
}

/** The text is the title; where there is none, the page's title is. */
export function showTitle() {
  const { queries, keys } = state.item.sections[state.section];
  const sentences = [...new Set([queries, keys].map((text) => state.item.texts[text].sentence))].join(" → ");
  byId("sentence").textContent = patchesOf() ? data.title : sentences;
  byId("sentence").classList.toggle("spoken", !patchesOf());
}

export function showHints() {
  if (patchesOf()) {
    hints.query &&= say`Click a patch to see what it looks at.`;
    hints.sum &&= say`Drag over the map of patches to add up weights.`;
  }
  for (const hint of document.querySelectorAll(".hint")) hint.textContent ||= hints[hint.dataset.hint];
}

/** A hint has been followed: it is not needed again. */
export function used(name) {
  hints[name] = "";
  document.querySelector(`.hint[data-hint="${name}"]`)?.classList.add("used");
}

function showDetails(query, key) {
  if (isSigned()) return showChange(query, key);
  const { rows, columns, entropy, received, pooled } = state.current;
  const percent = (share) => Number((100 * share).toPrecision(2));
  const about = (value) => (pooled ? say`about ${value}` : value);
  byId("details").textContent =
    say`query ${query} · entropy ${about(entropy[query].toFixed(2))} nats` +
    "   ·   " +
    say`key ${key} · receives ${about(brief(received[key]))} from ${rows.names.length} queries, ${percent(received[key] / rows.names.length)} %` +
    say` (${percent(1 / columns.names.length)} % if all were alike)`;
}
