// ---- the address: layer, head and token stand behind its #, so that a link shows them -------------------------------

import { data } from "./page_data.js";
import { state, viewCount, viewNumber } from "./page_state.js";

const ADDRESS = /^#layer=(\d{1,6})&head=(\d{1,6})(?:&token=(\d{1,6}))?(?:&section=(\d{1,3}))?(?:&text=(\d{1,6}))?$/;
const SETTLED = 300; // milliseconds: browsers refuse addresses that change too often
let writing = 0;

/** What the address asks for, as places; nothing where it says anything else. Without a token the page chooses one. */
export function readAddress() {
  const match = ADDRESS.exec(location.hash);
  if (!match) return null;
  const [layer, number, token, section = 0, text = 0] = match.slice(1).map((digits) => (digits === undefined ? undefined : Number(digits)));
  const head = data.sections[section]?.layers[layer]?.heads.indexOf(number) ?? -1;
  const item = text * viewCount() + viewNumber();
  return head < 0 || item >= data.items.length ? null : { layer, head, token, section, item };
}

export function writeAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    const { section, layer, head, number } = state;
    const { words } = state.current.rows;
    const parts = {
      layer,
      head: data.sections[section].layers[layer].heads[head],
      token: words ? words.indexOf(state.query) : state.query,
      ...(section ? { section } : {}),
      ...(number >= viewCount() ? { text: Math.floor(number / viewCount()) } : {}),
    };
    const hash = "#" + Object.entries(parts).map((part) => part.join("=")).join("&");
    // The frame of a notebook has no address.
    if (location.protocol !== "about:" && hash !== location.hash) history.replaceState(null, "", hash);
  }, SETTLED);
}
