// ---- the page of a census: its controls, and the first look ---------------------------------------------------------

import { choose, chooseByClick, headAt, showChosen } from "./census_choose.js";
import { drawGrid, listenToGrid } from "./census_grid.js";
import { drawScatter, listenToScatter } from "./census_scatter.js";
import { readColors } from "./page_color.js";
import { byId, data, option } from "./page_data.js";
import { listenToTheme } from "./page_theme.js";

function redraw() {
  readColors();
  drawScatter();
  drawGrid();
  showChosen();
}

function fillMenu(id, first, draw) {
  byId(id).append(...data.metrics.map(({ name }) => option(name, name, name === first)));
  byId(id).addEventListener("change", () => {
    draw();
    showChosen();
  });
}

function listenToLinks() {
  byId("kinds").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    event.preventDefault(); // in the frame of a notebook it would load the notebook
    chooseByClick(headAt(link.hash));
  });
  addEventListener("hashchange", () => headAt(location.hash) >= 0 && choose(headAt(location.hash)));
}

function listenToWindow() {
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // the frame of a notebook becomes as high as its page
    width = innerWidth;
    requestAnimationFrame(redraw);
  });
}

document.documentElement.dataset.script = "true";
fillMenu("across", data.across, drawScatter);
fillMenu("up", data.up, drawScatter);
fillMenu("metric", data.up, drawGrid);
listenToTheme(redraw);
for (const listen of [listenToScatter, listenToGrid, listenToLinks, listenToWindow]) listen();
readColors();
drawScatter();
drawGrid();
const asked = headAt(location.hash);
if (asked >= 0) choose(asked);
else showChosen();
document.documentElement.dataset.ready = "true";
