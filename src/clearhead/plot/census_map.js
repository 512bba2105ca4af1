// ---- the map of a head in one text ----------------------------------------------------------------------------------

import { drawn } from "./census_svg.js";
import { colorOf, css } from "./page_color.js";
import { clamp } from "./page_data.js";

const LETTERS = 11;
const LETTER = 6.4; // pixels, about
const LARGEST_CELL = 20;

/** In letters; those of some scripts are twice as wide. */
function widthOf(label) {
  return [...label].reduce((sum, letter) => sum + (letter > "\u1100" ? 2 : 1), 0);
}

/** The weights between neighbouring tokens, queries down and keys across; the chosen query has a frame. */
export function drawMap({ first, tokens, levels }, query, name, width) {
  const bytes = atob(levels);
  const count = tokens.length;
  const labels = tokens.map((token) => ([...token].length > LETTERS ? [...token].slice(0, LETTERS - 1).join("") + "…" : token));
  const edge = 10 + Math.ceil(LETTER * Math.max(...labels.map((label) => widthOf(label))));
  const cell = clamp(Math.floor((width - edge - 4) / count), LARGEST_CELL + 1);
  const size = cell * count;
  const map = drawn("svg", { class: "map", role: "img", "aria-label": name, width: edge + size + 2, height: edge + size + 2 });
  map.append(drawn("title", {}, name));
  const step = Math.ceil(13 / cell);
  labels.forEach((label, at) => {
    const away = Math.abs(at - query + first);
    if (away && (at % step || away < step)) return; // the query has a label, and room for it
    const middle = edge + (at + 0.5) * cell + 4;
    map.append(drawn("text", { x: edge - 5, y: middle, "text-anchor": "end" }, label));
    map.append(drawn("text", { transform: `translate(${middle} ${edge - 5}) rotate(-90)` }, label));
  });
  for (let at = 0; at < bytes.length; at++) {
    const weight = bytes.charCodeAt(at) / 255;
    if (!weight) continue;
    const [row, column] = [Math.floor(at / count), at % count];
    const place = { x: edge + column * cell, y: edge + row * cell, width: cell, height: cell, fill: css(colorOf(weight, 1)) };
    const square = drawn("rect", place);
    square.append(drawn("title", {}, `${tokens[row]} → ${tokens[column]} ${weight.toFixed(2)}`));
    map.append(square);
  }
  map.append(drawn("rect", { class: "edge", x: edge - 0.5, y: edge - 0.5, width: size + 1, height: size + 1 }));
  map.append(drawn("rect", { class: "query", x: edge, y: edge + (query - first) * cell, width: size, height: cell }));
  return map;
}
