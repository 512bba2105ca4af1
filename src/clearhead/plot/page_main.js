// ---- the controls, and the first look -------------------------------------------------------------------------------

import { followAddress, showItem, showSection } from "./page_choose.js";
import { byId, data, element, option } from "./page_data.js";
import {
  listenToControls,
  listenToOverview,
  listenToRankings,
  listenToSearch,
  listenToViews,
  listenToWindow,
} from "./page_listen.js";
import { listenToMap } from "./page_pointer.js";
import { listenToSave } from "./page_save.js";
import { redraw } from "./page_show.js";
import { buildViews, drawViews } from "./page_side_by_side.js";
import { viewCount, viewNumber } from "./page_state.js";
import { listenToTheme } from "./page_theme.js";

function buildControls() {
  const views = viewCount();
  data.items.forEach((item, number) => {
    if (number % views === 0) byId("item").append(option(number, item.label)); // others are views of the same text
  });
  byId("item-control").hidden = data.items.length < 2 * views;
  data.sections.forEach((section, index) => {
    const button = element("button", section.title);
    button.type = "button";
    button.addEventListener("click", () => showSection(index));
    byId("sections").append(button);
  });
  byId("sections").hidden = data.sections.length < 2;
}

document.documentElement.dataset.script = "true";
buildControls();
buildViews();
if (!(await followAddress())) await showItem(viewNumber());
// Only now: a telephone resizes the page while its numbers are still packed, and nothing can be drawn without them.
const listeners = [
  listenToControls,
  listenToOverview,
  listenToRankings,
  listenToViews,
  listenToSearch,
  listenToMap,
  listenToSave,
  listenToWindow,
];
for (const listen of listeners) listen();
listenToTheme(redraw);
drawViews();
document.documentElement.dataset.ready = "true";
