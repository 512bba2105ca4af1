// ---- choosing a head by click, key or address -----------------------------------------------------------------------

import { showHead } from "./census_head.js";
import { headsOf, layerCount } from "./census_heads.js";
import { byId, clamp, data, unpacked } from "./page_data.js";

const ADDRESS = /^#layer=(\d{1,6})&head=(\d{1,6})$/;
const strongest = (await unpacked(0)).item; // the rows of every head
let chosen = data.first;

/** The head of an address, as a place, or −1. */
export function headAt(address) {
  const match = ADDRESS.exec(address);
  return match ? data.heads.findIndex(({ layer, head }) => layer === Number(match[1]) && head === Number(match[2])) : -1;
}

/** Mark and show the chosen head, again where it is drawn again. */
export function showChosen() {
  for (const mark of document.querySelectorAll("[data-head]")) {
    const is = Number(mark.dataset.head) === chosen;
    mark.setAttribute("aria-pressed", is);
    mark.setAttribute("tabindex", is ? 0 : -1);
  }
  const scatter = byId("scatter");
  const point = scatter.querySelector("[aria-pressed=true]");
  if (!point) scatter.querySelector("[data-head]")?.setAttribute("tabindex", 0);
  const ring = byId("ring");
  ring.toggleAttribute("hidden", !point);
  for (const name of point ? ["cx", "cy"] : []) ring.setAttribute(name, point.getAttribute(name));
  showHead(chosen, strongest[chosen]);
}

export function choose(at) {
  chosen = at;
  const { layer, head } = data.heads[at];
  // The frame of a notebook has no address.
  if (location.protocol !== "about:") history.replaceState(null, "", `#layer=${layer}&head=${head}`);
  showChosen();
}

/** A click shows the head, even where its place on the page is out of view. */
export function chooseByClick(at) {
  choose(at);
  const { top, bottom } = byId("head-title").getBoundingClientRect();
  if (bottom < 0 || top > innerHeight - 60) byId("head").scrollIntoView({ block: "start" });
}

/** Arrow keys walk through the heads as the grid has them. */
export function walk(event, box) {
  const { layer, head } = data.heads[chosen];
  const down = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const right = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey || !(down || right)) return;
  event.preventDefault();
  const next = headsOf(clamp(layer + (down ?? 0), layerCount));
  choose(next[clamp(head + (right ?? 0), next.length)]);
  box.querySelector("[aria-pressed=true]")?.focus();
}
