// ---- the theme, and the frame of a notebook that offers one; notebook.js lies outside of the frame ------------------

import { prefersDark, printed } from "./page_color.js";
import { byId } from "./page_data.js";
import { redraw } from "./page_show.js";

let offeredTheme = "";

/** The chosen theme, or else the notebook's; without either, the browser's holds. */
function takeTheme() {
  document.documentElement.dataset.theme = byId("theme").value || offeredTheme;
  redraw();
}

export function listenToTheme() {
  byId("theme").addEventListener("change", takeTheme);
  for (const media of [prefersDark, printed]) media.addEventListener("change", redraw);
}

export function listenToNotebook() {
  if (parent === window) return;
  addEventListener("message", ({ source, data: said }) => {
    if (source !== parent || !["light", "dark"].includes(said?.theme) || said.theme === offeredTheme) return;
    offeredTheme = said.theme;
    takeTheme();
  });
  const { body } = document;
  new ResizeObserver(() => parent.postMessage({ height: Math.ceil(body.getBoundingClientRect().height) }, "*")).observe(body);
}
