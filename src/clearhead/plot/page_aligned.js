// ---- both texts of a comparison, one above the other ----------------------------------------------------------------

import { shortName, viewOf } from "./page_compared.js";
import { byId, data, element } from "./page_data.js";
import { isRightToLeft } from "./page_names.js";
import { patchesOf, placesOf, state, viewNumber } from "./page_state.js";

const MOST_ALIGNED = 400; // tokens

/** Places in two texts, one above the other, and whether both have the same token there; null is no token. */
function alignedPairs([first, second], counts) {
  const pairs = [];
  let [left, right] = [0, 0];
  const upTo = (one, other) => {
    while (left < one || right < other) pairs.push([left < one ? left++ : null, right < other ? right++ : null]);
  };
  const shared = new Set();
  first.forEach((place, at) => {
    upTo(place, second[at]);
    shared.add(pairs.length);
    pairs.push([left++, right++]);
  });
  upTo(...counts);
  return pairs.map((places, at) => ({ places, isShared: shared.has(at) }));
}

/** The texts that look, word above word; tokens that the other text does not have are marked. */
export async function showAligned() {
  const box = byId("aligned");
  const shared = data.compared && placesOf("queries");
  box.hidden = true;
  if (!shared || patchesOf()) return;
  const { section, number } = state;
  const views = [await viewOf(number - viewNumber()), await viewOf(number - viewNumber() + 1)];
  if (state.number !== number || state.section !== section) return; // another was chosen since
  const names = views.map(({ item }) => item.texts[item.sections[section].queries].names);
  if (Math.max(names[0].length, names[1].length) > MOST_ALIGNED) return;
  const column = (lines, kind = "") => {
    const made = document.createElement("span");
    made.append(...lines.map((text) => element("span", text, kind)));
    return made;
  };
  box.dir = isRightToLeft(names[0]) ? "rtl" : "ltr";
  const pairs = alignedPairs(shared, names.map((each) => each.length));
  box.replaceChildren(
    column([0, 1].map((view) => shortName(view) + ":"), "quiet"),
    ...pairs.map(({ places, isShared }) => {
      const lines = places.map((place, view) => (place === null ? "" : names[view][place]));
      return column(lines, isShared ? "" : "differs");
    }),
  );
  box.hidden = false;
}
