  // ---- what the page carries -------------------------------------------------------------------------------

  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);

  // Bytes per number and its meaning; packing.py has the inverses.
  const DECODERS = {
    units: [2, (n) => n / 10000],
    roots6: [1, (n) => (n / 63) ** 2],
    roots8: [1, (n) => (n / 255) ** 2],
    roots16: [2, (n) => (n / 65535) ** 2],
    thousandths: [2, (n) => n / 1000],
    signed: [2, (n) => n / 32767 - 1],
    signed_roots8: [1, (n) => Math.sign(n - 127) * ((n - 127) / 127) ** 2],
    signed_thousandths: [2, (n) => (n - 32767) / 1000],
    bytes: [1, (n) => n],
    index: [4, (n) => (n === 4294967295 ? -1 : n)],
  };
  const BYTES = {};
  for (const [name, [width, meaning]] of Object.entries(DECODERS)) {
    if (width === 1) BYTES[name] = Float64Array.from({ length: 256 }, (_, n) => meaning(n));
  }

  /** One item's numbers, and the description of them that lies among them. */
  async function unpacked(number) {
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

  /** `count` numbers of an array, from its number `from` on. */
  function decoded(bytes, [encoding, first, length], from = 0, count = length) {
    const [width, meaning] = DECODERS[encoding];
    const numbers = new Float64Array(count);
    if (width === 1) {
      for (let i = 0; i < count; i++) numbers[i] = BYTES[encoding][bytes[first + from + i]];
      return numbers;
    }
    for (let plane = width - 1; plane >= 0; plane--) {
      const start = first + plane * length + from;
      for (let i = 0; i < count; i++) numbers[i] = numbers[i] * 256 + bytes[start + i];
    }
    for (let i = 0; i < count; i++) numbers[i] = meaning(numbers[i]);
    return numbers;
  }

  function element(name, text = "", kind = "") {
    const result = document.createElement(name);
    result.textContent = text;
    if (kind) result.className = kind;
    result.dir = "auto";
    return result;
  }

  function clamp(index, count) {
    return Math.max(0, Math.min(count - 1, index));
  }

  function ordered(a, b) {
    return a <= b ? [a, b] : [b, a];
  }
