// ---- two side by side: the chosen head in the views of a comparison -------------------------------------------------

import { shortName, viewOf } from "./page_compared.js";
import { byId, data, element, say } from "./page_data.js";
import { showReadout } from "./page_finding.js";
import { paintHead } from "./page_numbers.js";
import { rankedHead } from "./page_search.js";
import { isSigned, state, viewNumber } from "./page_state.js";

const VIEW_PIXELS = 150;

export function buildViews() {
  if (!data.compared) return;
  const { views, note, by, ranked } = data.compared;
  byId("compared-note").textContent = note;
  byId("views").replaceChildren(...views.map(buildView));
  const scores = by === "divergence" ? say`their Jensen–Shannon divergence in nats` : say`the change of their ${by}`;
  byId("ranked-title").textContent = say`heads that differ most, by ${scores}`;
  byId("ranked-list").replaceChildren(...ranked.map(([section, layer, head, score]) => rankedHead([section, layer, head], score.toFixed(3))));
  for (const id of ["compared-note", "views", "ranked"]) byId(id).hidden = false;
}

function buildView(name, view) {
  const button = element("button");
  button.type = "button";
  const label = view < 2 && shortName(view) !== name ? `${shortName(view)}: ${name}` : name;
  button.append(document.createElement("canvas"), element("span", label));
  button.title = name;
  return button;
}

/** Draw the chosen head in every view, small. */
export async function drawViews() {
  if (!data.compared) return;
  const first = state.number - viewNumber();
  const { layer, head, section } = state;
  for (const [view, button] of [...byId("views").children].entries()) {
    const shown = await viewOf(first + view);
    if (state.layer !== layer || state.head !== head || state.section !== section) return; // another was chosen since
    paintHead(button.firstChild, shown, layer, head, VIEW_PIXELS);
    button.setAttribute("aria-pressed", String(view === viewNumber()));
  }
  if (isSigned()) showReadout(state.shown.query, state.shown.key); // the weights of both are known now
}
