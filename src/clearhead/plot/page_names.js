// ---- names of tokens, as the page writes them -----------------------------------------------------------------------

const RIGHT_TO_LEFT = /[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;

/** Whether more tokens with letters are read from right to left than from left to right. */
export function isRightToLeft(names) {
  const withLetters = names.filter((name) => /\p{L}/u.test(name));
  return 2 * withLetters.filter((name) => RIGHT_TO_LEFT.test(name)).length > withLetters.length;
}

const repeats = new WeakMap(); // names of tokens → those that come more than once

/** A token's name; with its position where another token has the same name. */
export function numbered(names, place) {
  if (!repeats.has(names)) {
    const seen = new Set();
    repeats.set(names, new Set(names.filter((name) => seen.size === seen.add(name).size)));
  }
  return repeats.get(names).has(names[place]) ? `${names[place]} (${place})` : names[place];
}

export function quoted(names, [first, last]) {
  const part = names.slice(first, last + 1);
  return part.length > 6 ? `${part.slice(0, 2).join(" ")} … ${part.slice(-2).join(" ")}` : part.join(" ");
}
