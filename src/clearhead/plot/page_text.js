// ---- the text, and pointer and keyboard on it -----------------------------------------------------------------------

import { clamp, element, ordered, say } from "./page_data.js";
import { used } from "./page_finding.js";
import { isRightToLeft } from "./page_names.js";
import { arrow, select } from "./page_pointer.js";
import { textBoxes, textOf } from "./page_shading.js";
import { pin, show } from "./page_show.js";
import { differing, state } from "./page_state.js";
import { reveal } from "./page_view.js";

const PARAGRAPH = 300; // tokens

export function buildText(side, axis, title) {
  const box = element("p", "", "text " + side);
  box.tabIndex = 0;
  box.setAttribute("role", "application");
  box.setAttribute("aria-label", say`${title}, token by token`);
  const marks = differing(side === "queries" ? "queries" : "keys");
  const tokens = axis.names.map((name, place) => {
    const span = element("span", name, marks.has(place) ? "differs" : "");
    span.dataset.place = place;
    return span;
  });
  box.dir = isRightToLeft(axis.names) ? "rtl" : "ltr";
  if (tokens.length <= PARAGRAPH) box.append(...tokens);
  else for (let first = 0; first < tokens.length; first += PARAGRAPH) box.append(paragraph(tokens.slice(first, first + PARAGRAPH)));
  textBoxes.set(side, { box, tokens, query: null, span: null });
  listenToText(box, side);
  return box;
}

/** Part of a long text, laid out when it comes into view. */
function paragraph(tokens) {
  const part = document.createElement("div");
  part.append(...tokens);
  return part;
}

function tokenUnder(event) {
  const mark = document.elementFromPoint(event.clientX, event.clientY)?.closest?.(".text span");
  return mark && mark.closest(".text") === event.currentTarget ? Number(mark.dataset.place) : null;
}

/** In the text that looks a click keeps a query; in the text that is looked at a drag selects keys. */
function listenToText(box, side) {
  let anchor = null;
  box.addEventListener("pointerdown", (event) => {
    anchor = event.button === 0 ? tokenUnder(event) : null;
    if (event.shiftKey && anchor !== null && side === "both") select(null, ordered(state.query, anchor));
  });
  box.addEventListener("pointermove", (event) => {
    const at = tokenUnder(event);
    if (at === null) return;
    const pressed = anchor !== null && event.buttons & 1;
    if (pressed && side !== "queries") {
      if (at !== anchor || side === "keys") select(null, ordered(anchor, at));
    } else if (!pressed) {
      side === "keys" ? show(state.query, at) : show(at, null);
    }
  });
  box.addEventListener("pointerup", (event) => {
    const at = tokenUnder(event);
    if (at !== null && at === anchor) used("query");
    if (at !== null && at === anchor && !event.shiftKey) side === "keys" ? pin(state.query, at) : pin(at, null);
    anchor = null;
  });
  box.addEventListener("pointerleave", () => show(state.query, state.key));
  box.addEventListener("keydown", (event) => walkText(event, side));
}

function walkText(event, side) {
  const step = arrow(event);
  if (!step) return;
  event.preventDefault();
  const by = (textOf(side).box.dir === "rtl" ? -step.right : step.right) + step.down;
  if (event.shiftKey && side !== "queries") {
    const from = state.anchor ?? [state.query, state.key ?? (side === "both" ? state.query : 0)];
    const at = state.span && state.anchor ? (state.span.columns[0] === from[1] ? state.span.columns[1] : state.span.columns[0]) : from[1];
    select(null, ordered(from[1], clamp(at + by, state.current.columns.names.length)), from);
  } else if (side === "keys") {
    pin(state.query, clamp((state.key ?? -1) + by, state.current.columns.names.length));
  } else {
    pin(clamp(state.query + by, state.current.rows.names.length), null);
    reveal(state.query, null);
  }
}
