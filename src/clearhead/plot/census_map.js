// ---- the map of a head in one text ----------------------------------------------------------------------------------

import { drawn } from "./census_svg.js";
import { colorOf, css } from "./page_color.js";
import { clamp } from "./page_data.js";

const LABEL = 84; // pixels beside and above the cells
const LETTERS = 11;
const LARGEST_CELL = 20;

/** The weights between neighbouring tokens, queries down and keys across; the chosen query has a frame. */
export function drawMap({ first, tokens, levels }, query, name, width) {
  const bytes = atob(levels);
  const count = tokens.length;
  const cell = clamp(Math.floor((width - LABEL - 4) / count), LARGEST_CELL + 1);
  const size = cell * count;
  const map = drawn("svg", { class: "map", role: "img", "aria-label": name, width: LABEL + size + 2, height: LABEL + size + 2 });
  map.append(drawn("title", {}, name));
  const step = Math.ceil(13 / cell);
  tokens.forEach((token, at) => {
    if (at % step && at !== query - first) return;
    if (at % step === 0 && at !== query - first && Math.abs(at - query + first) < step) return;
    const middle = LABEL + (at + 0.5) * cell + 4;
    const label = [...token].length > LETTERS ? [...token].slice(0, LETTERS - 1).join("") + "…" : token;
    map.append(drawn("text", { x: LABEL - 5, y: middle, "text-anchor": "end" }, label));
    map.append(drawn("text", { transform: `translate(${middle} ${LABEL - 5}) rotate(-90)` }, label));
  });
  for (let at = 0; at < bytes.length; at++) {
    const weight = bytes.charCodeAt(at) / 255;
    if (!weight) continue;
    const [row, column] = [Math.floor(at / count), at % count];
    const place = { x: LABEL + column * cell, y: LABEL + row * cell, width: cell, height: cell, fill: css(colorOf(weight, 1)) };
    const square = drawn("rect", place);
    square.append(drawn("title", {}, `${tokens[row]} → ${tokens[column]} ${weight.toFixed(2)}`));
    map.append(square);
  }
  map.append(drawn("rect", { class: "edge", x: LABEL - 0.5, y: LABEL - 0.5, width: size + 1, height: size + 1 }));
  map.append(drawn("rect", { class: "query", x: LABEL, y: LABEL + (query - first) * cell, width: size, height: cell }));
  return map;
}
