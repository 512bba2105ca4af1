// ---- what controls, lists of heads and the window answer ------------------------------------------------------------

import { choose, followAddress, showItem, showSection, showView } from "./page_choose.js";
import { byId, clamp } from "./page_data.js";
import { used } from "./page_finding.js";
import { overview, showOverview, showStatistic, tell } from "./page_overview.js";
import { arrow, unselect } from "./page_pointer.js";
import { fillMenu } from "./page_search.js";
import { pin, redraw, show, showAll } from "./page_show.js";
import { askedPair, state, viewNumber } from "./page_state.js";
import { reveal, zoomHere, zoomToSpan } from "./page_view.js";

export function listenToControls() {
  byId("item").addEventListener("change", (event) => showItem(Number(event.target.value) + viewNumber()));
  for (const [id, answer] of [["words", () => {}], ["special", showStatistic]]) {
    byId(id).addEventListener("change", (event) => {
      state[id] = event.target.checked;
      choose(state.layer, state.head);
      answer();
    });
  }
  byId("arcs").addEventListener("change", (event) => {
    state.arcs = event.target.checked;
    show(state.query, state.key);
  });
  for (const [name, answer] of [["statistic", showStatistic], ["order", showOverview]]) {
    byId(name).addEventListener("change", (event) => {
      state[name] = event.target.value;
      answer();
    });
  }
  byId("zoom-in").addEventListener("click", () => zoomHere(0.5));
  byId("zoom-out").addEventListener("click", () => zoomHere(2));
  byId("zoom-fit").addEventListener("click", showAll);
  byId("sum-zoom").addEventListener("click", zoomToSpan);
  byId("sum-clear").addEventListener("click", unselect);
}

export function listenToWindow() {
  addEventListener("keydown", (event) => event.key === "Escape" && state.span && unselect());
  addEventListener("hashchange", followAddress);
  let resizing = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(redraw);
  });
}

export function listenToOverview() {
  const box = byId("overview");
  const on = (name, answer) =>
    box.addEventListener(name, (event) => {
      const place = placeUnder(event);
      if (place) answer(place, event);
    });
  on("click", (place) => {
    used("head");
    choose(...place);
  });
  on("keydown", ([layer, head], event) => walkHeads(event, layer, head));
  for (const name of ["pointerover", "focusin"]) on(name, (place) => tell(...place));
  box.addEventListener("pointerleave", () => tell(state.layer, state.head));
}

/** What the button that an event came from stands for: layer and head, in a ranking after their section. */
function placeUnder(event) {
  const button = event.target.closest("button");
  return button && button.dataset.place.split("-").map(Number);
}

function walkHeads(event, layer, head) {
  const step = arrow(event);
  if (!step) return;
  event.preventDefault();
  used("head");
  const [row, column] = overview.places.get(layer + "-" + head);
  let next = row + step.down;
  while (overview.rows[next]?.heading) next += step.down; // headings of groups hold no heads
  const { heads } = overview.rows[overview.rows[next]?.heads.length ? next : row];
  const [nextLayer, nextHead] = heads[clamp(column + step.right, heads.length)];
  choose(nextLayer, nextHead);
  overview.buttons.get(nextLayer + "-" + nextHead).focus();
}

export function listenToSearch() {
  const answer = ({ target }) => {
    const [from, to] = ["from", "to"].map((id) => byId(id).value);
    pin(Number(from), target.id === "from" ? state.key : Number(to));
    reveal(state.query, state.key);
  };
  for (const id of ["from", "to"]) {
    for (const name of ["focus", "pointerdown"]) byId(id).addEventListener(name, () => fillMenu(id));
    byId(id).addEventListener("change", answer);
  }
}

export function listenToRankings() {
  for (const list of document.querySelectorAll(".ranking")) {
    list.addEventListener("click", (event) => {
      const place = placeUnder(event);
      if (!place) return;
      const [section, layer, head] = place;
      if (list.id === "search-list") state.key = askedPair()[1]; // another head would ask another question
      if (section !== state.section) showSection(section);
      choose(layer, head);
    });
  }
}

export function listenToViews() {
  byId("views").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) showView([...byId("views").children].indexOf(button));
  });
}
