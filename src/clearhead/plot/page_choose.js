// ---- choosing a text, a section, a head and a view ------------------------------------------------------------------

import { readAddress } from "./page_address.js";
import { showAligned } from "./page_aligned.js";
import { buildOrders } from "./page_arrange.js";
import { counterpart } from "./page_compared.js";
import { byId, data, element, option, say, unpacked } from "./page_data.js";
import { showHints, showTitle } from "./page_finding.js";
import { showNotes } from "./page_fonts.js";
import { headOf, withoutSpecial } from "./page_grids.js";
import { drawMap } from "./page_map.js";
import { markChosen, showOverview, tell } from "./page_overview.js";
import { buildPicture } from "./page_patches.js";
import { emptyMenus } from "./page_search.js";
import { forgetTexts, showSum } from "./page_shading.js";
import { pin } from "./page_show.js";
import { drawViews } from "./page_side_by_side.js";
import { headName, isSame, isSigned, patchesOf, specialKeys, state, viewCount, viewNumber } from "./page_state.js";
import { buildText } from "./page_text.js";
import { fit, reveal, setView } from "./page_view.js";

export async function showItem(number) {
  Object.assign(state, await unpacked(number)); // one text at a time is held unpacked, in all its views
  state.number = number;
  const { texts } = state.item;
  const heads = data.sections.flatMap((section) => section.layers.map((layer) => layer.heads.length));
  const [least, most] = [Math.min(...heads), Math.max(...heads)];
  const count = data.sections.length > 1 ? say`${heads.length} attention layers` : heads.length === 1 ? say`1 layer` : say`${heads.length} layers`;
  const perLayer = most === 1 ? say`1 head` : say`${least === most ? most : say`${least} to ${most}`} heads`;
  byId("facts").textContent =
    `${data.title} · ${count} × ${perLayer} · ` +
    sizeOfItem() +
    (data.items.length > viewCount() ? say` · text ${Math.floor(number / viewCount()) + 1} of ${data.items.length / viewCount()}` : "");
  byId("item").value = number - viewNumber();
  byId("words-control").hidden = !texts.some((text) => text.words);
  byId("special-control").hidden = !texts.some((text) => text.special.length);
  showNotes();
  showSection(state.section);
}

function sizeOfItem() {
  const lengths = [...new Set(state.item.texts.map(({ names }) => names.length))];
  if (!patchesOf()) return lengths.join() === "1" ? say`1 token` : say`${lengths.join(say` and `)} tokens`;
  const { grid, side } = patchesOf();
  const size = grid.join(" × ");
  return side > 1 ? say`${size} tiles of ${side} × ${side} patches` : say`${size} patches`;
}

export function showSection(section) {
  if (section !== state.section) {
    state.section = section;
    state.layer = state.head = 0;
  }
  state.current = null;
  const { statistics } = data.sections[section];
  if (!statistics.includes(state.statistic)) state.statistic = "maps";
  for (const [index, button] of [...byId("sections").children].entries()) {
    button.setAttribute("aria-pressed", String(index === section));
  }
  byId("arcs-control").hidden = Boolean(patchesOf());
  const maps = patchesOf() ? say`over the picture` : say`maps`;
  byId("statistic").replaceChildren(
    ...[["maps", maps], ...statistics.map((name) => [name, name])].map(([name, text]) => option(name, text, name === state.statistic)),
  );
  buildOrders();
  showTitle();
  showHints();
  largeHead();
  showOverview();
  choose(state.layer, state.head);
  showAligned();
}

/** Read the head that is large, between tokens or words, with or without special tokens. */
function largeHead() {
  const { section, layer, head } = state;
  let shown = headOf(state.bytes, state.item, section, layer, head);
  if (state.special && shown.complete && !isSigned()) shown = withoutSpecial(shown, specialKeys());
  if (state.words && shown.words) shown = shown.words();
  changeHead(shown);
}

export function choose(layer, head) {
  Object.assign(state, { layer, head });
  const name = headName(layer, head);
  byId("head-title").textContent = name[0].toUpperCase() + name.slice(1);
  byId("head-title").title = data.sections[state.section].layers[layer].name;
  byId("census").hidden = !data.link;
  if (data.link) byId("census").href = `${data.link}#layer=${layer}&head=${data.sections[state.section].layers[layer].heads[head]}`;
  byId("map").setAttribute("aria-label", say`Weights of ${name}. The arrow keys move from cell to cell.`);
  markChosen();
  tell(layer, head);
  drawViews();
  largeHead();
  drawMap();
  pin(state.query, state.key);
  showSum();
}

/** Take another head; where its rows are other tokens or words, start over or translate the place. */
function changeHead(next) {
  const before = state.current;
  const wasWords = before && before.rows.words;
  state.current = next;
  if (!before) {
    const start = state.item.sections[state.section].start;
    [state.query, state.key] = [next.rows.words ? next.rows.words[start] : start, null];
  } else if (Boolean(wasWords) !== Boolean(next.rows.words)) {
    const translated = (from, to, place) => (from ? from.indexOf(place) : to[place]);
    state.query = translated(before.rows.words, next.rows.words, state.query);
    state.key = state.key === null ? null : translated(before.columns.words, next.columns.words, state.key);
  }
  if (!before || Boolean(wasWords) !== Boolean(next.rows.words)) {
    state.span = state.anchor = null;
    fit();
    buildTexts();
  }
  state.shown = { query: state.query, key: state.key };
}

/** One text where it looks at itself; else the text that looks and the text that is looked at. */
function buildTexts() {
  const { rows, columns } = state.current;
  forgetTexts();
  emptyMenus();
  if (patchesOf()) {
    buildPicture();
  } else if (isSame()) {
    byId("texts").replaceChildren(buildText("both", columns, say`The text`));
  } else {
    byId("texts").replaceChildren(
      element("p", say`looks`, "quiet side"),
      buildText("queries", rows, say`The text that looks`),
      element("p", say`is looked at`, "quiet side"),
      buildText("keys", columns, say`The text that is looked at`),
    );
  }
}

/** Show what the address asks for. */
export async function followAddress() {
  const wanted = readAddress();
  if (!wanted) return false;
  const { layer, head, section, item } = wanted;
  if (state.item && state.number === item && state.section === section) {
    choose(layer, head);
  } else {
    Object.assign(state, { section, layer, head });
    await showItem(item);
  }
  const { words, names } = state.current.rows;
  const query = words ? words[wanted.token] : wanted.token;
  if (query < names.length) pin(query, null); // not without a token
  reveal(state.query, null);
  return true;
}

/** Show another view of the same head, at the same tokens. */
export async function showView(view) {
  const from = viewNumber();
  const { query, key } = state;
  const isWords = Boolean(state.current.rows.words);
  const part = { ...state.view };
  const sizes = [state.current.rows.names.length, state.current.columns.names.length];
  const { layer, head, section } = state;
  await showItem(state.number - from + view);
  if (state.section === section && (state.layer !== layer || state.head !== head)) choose(layer, head);
  if (isWords || state.current.rows.words) return;
  const next = [counterpart("queries", query, from, view), key === null ? null : counterpart("keys", key, from, view)];
  if (sizes[0] === state.current.rows.names.length && sizes[1] === state.current.columns.names.length) {
    setView(part.row, part.column, part.rows, part.columns);
  }
  if (next[0] !== null) pin(next[0], next[1]);
}
