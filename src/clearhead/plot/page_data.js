// ---- what the page carries ------------------------------------------------------------------------------------------

export const byId = (id) => document.getElementById(id);
export const data = JSON.parse(byId("data").textContent);

/** A text in the page's language. `words` has it by the English text, with {0}, {1}, … for the values. */
export function say(parts, ...values) {
  const english = parts.reduce((text, part, at) => `${text}{${at - 1}}${part}`);
  return (data.words[english] ?? english).replace(/\{(\d)\}/g, (_, at) => values[at]);
}

/** One item's numbers, and the description of them that lies among them. */
export async function unpacked(number) {
  const [first, length] = data.items[number].description;
  const bytes = await inflated(byId("stream-" + number).textContent);
  const text = new TextDecoder().decode(bytes.subarray(first, first + length));
  return { bytes, item: JSON.parse(text) };
}

async function inflated(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = characters.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** `count` numbers of an array, from its number `from` on; `_encoding.py` has the inverse. */
export function decoded(bytes, [law, width, levels, zero, first, length], from = 0, count = length) {
  const numbers = new Float64Array(count);
  for (let plane = width - 1; plane >= 0; plane--) {
    const start = first + plane * length + from;
    for (let i = 0; i < count; i++) numbers[i] = numbers[i] * 256 + bytes[start + i];
  }
  const rooted = law === "root";
  for (let i = 0; i < count; i++) {
    const number = (numbers[i] - zero) / levels;
    numbers[i] = rooted ? number * Math.abs(number) : number;
  }
  return numbers;
}

export function element(name, text = "", kind = "") {
  const result = document.createElement(name);
  result.textContent = text;
  if (kind) result.className = kind;
  result.dir = "auto";
  return result;
}

export function option(value, text, selected = false) {
  const result = element("option", text);
  result.value = value;
  result.selected = selected;
  return result;
}

export function clamp(index, count) {
  return Math.max(0, Math.min(count - 1, index));
}

export function ordered(a, b) {
  return a <= b ? [a, b] : [b, a];
}
