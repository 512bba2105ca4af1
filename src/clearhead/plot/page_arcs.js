// ---- arcs over the text: from the chosen token to what it looks at most ---------------------------------------------

import { colorOf, css } from "./page_color.js";
import { byId } from "./page_data.js";
import { mostOf } from "./page_grids.js";
import { textOf } from "./page_shading.js";
import { isSame, isSigned, patchesOf, state } from "./page_state.js";

const ARC_BEND = 12; // pixels from a token to where its arc is level
const arcs = byId("arcs-picture");

/** Draw the arcs of a query: above the lines of one text, or from one text to the other. */
export function drawArcs(query) {
  const isOn = state.arcs && !patchesOf();
  byId("texts").classList.toggle("arcs", isOn);
  arcs.remove();
  if (!isOn) return;
  const [from, to] = [textOf("queries"), textOf("keys")];
  const box = isSame() ? from.box : byId("texts");
  sizeArcs(0, 0); // they must not keep the box as high as it was
  box.append(arcs);
  const { left, top } = box.getBoundingClientRect();
  const placeOf = (text, token) => {
    const [inner, outer] = [text.tokens[token].getBoundingClientRect(), text.box.getBoundingClientRect()];
    const place = { top: inner.top - top + box.scrollTop, x: (inner.left + inner.right) / 2 - left, height: inner.height };
    return { ...place, isSeen: isSame() || (inner.top > outer.top - 2 && inner.bottom < outer.bottom + 2) };
  };
  const start = placeOf(from, query);
  const room = parseFloat(getComputedStyle(from.box).lineHeight) - start.height - 4;
  const paths = mostOf(query).filter(({ weight }) => weight).map(({ keys, weight }) => {
    const key = Math.floor((keys[0] + keys[1]) / 2);
    const end = placeOf(to, key);
    if (!start.isSeen || !end.isSeen) return "";
    const line = isSame() ? arcOver(start, end, room, box.clientWidth, key > query) : arcBetween(start, end);
    return arcPath(line, weight);
  });
  sizeArcs(box.clientWidth, box.scrollHeight);
  arcs.replaceChildren(...paths);
}

function sizeArcs(width, height) {
  arcs.setAttribute("width", width);
  arcs.setAttribute("height", height);
}

function arcPath(line, weight) {
  const path = document.createElementNS(arcs.namespaceURI, "path");
  const share = Math.min(1, Math.abs(weight));
  path.setAttribute("d", line);
  path.setAttribute("stroke-width", 1 + 5 * share);
  path.setAttribute("stroke-opacity", 0.35 + 0.65 * share);
  if (isSigned()) path.style.stroke = css(colorOf(Math.sign(weight) * 0.5, 1));
  return path;
}

/** Over one line; or to the end of a line, and on from the beginning of another. */
function arcOver(start, end, room, width, isLater) {
  if (Math.abs(start.top - end.top) < 4) {
    const [first, last] = start.x === end.x ? [start.x - 5, end.x + 5] : [start.x, end.x];
    const level = Math.min(start.top, end.top) - Math.min(room, 8 + Math.abs(first - last) / 10) * 1.3;
    return `M${first} ${start.top}C${first} ${level} ${last} ${level} ${last} ${end.top}`;
  }
  const goesRight = isLater !== (textOf("keys").box.dir === "rtl");
  const toEdge = (place, edge) => {
    const level = place.top - room;
    return `M${place.x} ${place.top}Q${place.x} ${level} ${place.x + Math.sign(edge - place.x) * ARC_BEND} ${level}H${edge}`;
  };
  return toEdge(start, goesRight ? width : 0) + toEdge(end, goesRight ? 0 : width);
}

/** From a token of the upper text to one of the lower. */
function arcBetween(start, end) {
  const from = start.top + start.height;
  const middle = (from + end.top) / 2;
  return `M${start.x} ${from}C${start.x} ${middle} ${end.x} ${middle} ${end.x} ${end.top}`;
}
