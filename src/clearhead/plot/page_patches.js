// ---- the picture in place of a text, and pointer and keyboard on it -------------------------------------------------

import { byId, clamp, element, say } from "./page_data.js";
import { drawPlain } from "./page_picture.js";
import { arrow } from "./page_pointer.js";
import { pin, show } from "./page_show.js";
import { isSame, patchesOf, state } from "./page_state.js";
import { buildText } from "./page_text.js";
import { reveal } from "./page_view.js";

const PICTURE_SIDES = { over: 560, plain: 200 }; // CSS pixels

export function buildPicture() {
  const { rows, columns } = state.current;
  const { prefix, grid, side } = patchesOf();
  const box = element("div", "", "picture");
  const what = side > 1 ? say`, ${side} × ${side} patches at a time` : "";
  box.append(
    buildCanvas("over", say`What the chosen token looks at, over the picture`),
    buildCanvas("plain", say`The picture the model was shown${what}`),
  );
  byId("frame").before(byId("texts"), byId("map-scale"), byId("sum")); // the map comes after the picture
  const name = columns.names[prefix + Math.min(columns.names.length - prefix, 2 * grid[1]) - 1]; // the last of the second row, if there is one
  const [row, column] = name.match(/[\d–]+/g);
  const lines = [box, element("p", say`${name} is row ${row}, column ${column}, counted from 0`, "quiet side")];
  if (isSame() && prefix) {
    lines.push(
      element("p", say`tokens that are no patches`, "quiet side"),
      buildText("both", { names: columns.names.slice(0, prefix) }, say`Tokens that are no patches`),
    );
  } else if (!isSame()) {
    lines.push(element("p", say`looks`, "quiet side"), buildText("queries", rows, say`What looks`));
    if (prefix) {
      lines.push(element("p", say`is looked at`, "quiet side"));
      lines.push(buildText("keys", { names: columns.names.slice(0, prefix) }, say`Tokens that are no patches`));
    }
  }
  byId("texts").replaceChildren(...lines);
  drawPlain();
}

function buildCanvas(kind, title) {
  const canvas = element("canvas", "", kind);
  const [height, width] = state.item.picture.size;
  const ratio = devicePixelRatio || 1;
  const scale = PICTURE_SIDES[kind] / Math.max(height, width);
  canvas.style.width = `${width * scale}px`;
  [canvas.width, canvas.height] = [width, height].map((pixels) => Math.max(1, Math.round(pixels * scale * ratio)));
  canvas.style.aspectRatio = `${width} / ${height}`;
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", say`${title}. The arrow keys move from patch to patch.`);
  canvas.addEventListener("pointermove", (event) => {
    const at = patchUnder(event, canvas);
    isSame() ? show(at, null) : show(state.query, at);
  });
  canvas.addEventListener("pointerleave", () => show(state.query, state.key));
  canvas.addEventListener("click", (event) => {
    const at = patchUnder(event, canvas);
    isSame() ? pin(at, null) : pin(state.query, at);
  });
  canvas.addEventListener("keydown", walkPatches);
  return canvas;
}

/** The token of the patch under the pointer. */
function patchUnder(event, canvas) {
  const { prefix, grid, cell } = patchesOf();
  const [height, width] = state.item.picture.size;
  const box = canvas.getBoundingClientRect();
  const row = clamp(Math.floor((((event.clientY - box.top) / box.height) * height) / cell[0]), grid[0]);
  const column = clamp(Math.floor((((event.clientX - box.left) / box.width) * width) / cell[1]), grid[1]);
  return prefix + row * grid[1] + column;
}

function walkPatches(event) {
  const step = arrow(event);
  if (!step) return;
  event.preventDefault();
  const { prefix, grid } = patchesOf();
  const from = (isSame() ? state.query : (state.key ?? prefix)) - prefix;
  const [row, column] = from < 0 ? [0, 0] : [Math.floor(from / grid[1]), from % grid[1]];
  const to = from < 0 ? prefix : prefix + clamp(row + step.down, grid[0]) * grid[1] + clamp(column + step.right, grid[1]);
  isSame() ? pin(to, null) : pin(state.query, to);
  reveal(state.query, state.key);
}
