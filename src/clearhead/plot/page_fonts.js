// ---- characters that no font of the system has ----------------------------------------------------------------------

import { byId, data, say } from "./page_data.js";
import { state } from "./page_state.js";

const MOST_CHECKED = 60;
const NO_CHARACTER = "\uffff"; // drawn as the box of a missing character

function missingCharacters(names) {
  const special = [...new Set(names.join(""))].filter((each) => each > "\u02ff" && !/[\p{M}\p{Z}\p{Cc}\p{Cf}\p{Cs}\p{Co}]/u.test(each));
  if (!special.length) return [];
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 24;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.font = "16px " + getComputedStyle(document.body).fontFamily;
  const drawn = (character) => {
    context.clearRect(0, 0, 24, 24);
    context.fillText(character, 2, 18);
    return canvas.toDataURL();
  };
  const box = drawn(NO_CHARACTER);
  return special.slice(0, MOST_CHECKED).filter((character) => drawn(character) === box);
}

/** Notes about the whole page, and the first characters that are boxes. */
export function showNotes() {
  const missing = missingCharacters(state.item.texts.flatMap(({ names }) => names)).slice(0, 4);
  const fonts = missing.length
    ? [say`No font of this computer has ${missing.join(" ")}. Noto Sans CJK has Chinese, Japanese and Korean, Noto Color Emoji has emoji.`]
    : [];
  byId("notes").textContent = [...data.notes, ...fonts].join(" ");
  byId("notes").hidden = !byId("notes").textContent;
}
