  // ---- the text, and what one token looks at -----------------------------------------------------------------

  const PARAGRAPH = 300; // tokens
  let shaded = {};
  const texts = new Map(); // side → the box and its tokens

  function isSame() {
    return data.sections[state.section].same;
  }

  /** One text where it looks at itself; else the text that looks and the text that is looked at. */
  function buildTexts() {
    const { rows, columns } = state.current;
    shaded = {};
    texts.clear();
    emptyMenus();
    if (patchesOf()) {
      buildPicture();
    } else if (isSame()) {
      byId("texts").replaceChildren(buildText("both", columns, say`The text`));
    } else {
      byId("texts").replaceChildren(
        element("p", say`looks`, "quiet side"),
        buildText("queries", rows, say`The text that looks`),
        element("p", say`is looked at`, "quiet side"),
        buildText("keys", columns, say`The text that is looked at`),
      );
    }
  }

  const RIGHT_TO_LEFT = /[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;

  /** Whether more tokens with letters are read from right to left than from left to right. */
  function isRightToLeft(names) {
    const withLetters = names.filter((name) => /\p{L}/u.test(name));
    return 2 * withLetters.filter((name) => RIGHT_TO_LEFT.test(name)).length > withLetters.length;
  }

  function buildText(side, axis, title) {
    const box = element("p", "", "text " + side);
    box.tabIndex = 0;
    box.setAttribute("role", "application");
    box.setAttribute("aria-label", say`${title}, token by token`);
    const marks = differing(side === "queries" ? "queries" : "keys");
    const tokens = axis.names.map((name, place) => {
      const span = element("span", name, marks.has(place) ? "differs" : "");
      span.dataset.place = place;
      return span;
    });
    box.dir = isRightToLeft(axis.names) ? "rtl" : "ltr";
    if (tokens.length <= PARAGRAPH) box.append(...tokens);
    else for (let first = 0; first < tokens.length; first += PARAGRAPH) box.append(paragraph(tokens.slice(first, first + PARAGRAPH)));
    texts.set(side, { box, tokens, query: null, span: null });
    listenToText(box, side);
    return box;
  }

  /** Part of a long text, laid out when it comes into view. */
  function paragraph(tokens) {
    const part = document.createElement("div");
    part.append(...tokens);
    return part;
  }

  function textOf(side) {
    return texts.get(side) || texts.get("both");
  }

  /** What colours the keys of a row: its weights as far as they are known one by one, else its tiles. */
  function shadesOf(query) {
    const { columns, grids, listed, complete } = state.current;
    const { cellEnd, tileEnd } = scaleEnds();
    const even = evenWeights();
    const none = even ? colors[0] : colorOf(0, cellEnd);
    const shades = new Map();
    if (complete) {
      for (let key = 0; key < columns.names.length; key++) {
        const weight = weightAt(grids[0], query, key);
        const color = even ? multipleColor(weight, even.weights[key], even.end) : colorOf(weight, cellEnd);
        if (color !== none) shades.set(key, color);
      }
    } else {
      const end = listed ? cellEnd : tileEnd;
      for (const { keys, weight } of mostOf(query).filter(({ weight }) => weight)) {
        for (let key = keys[0]; key <= keys[1]; key++) shades.set(key, colorOf(weight, end));
      }
    }
    return shades;
  }

  /** Colour the text; of a long one only what changes. */
  function shadeText(query) {
    const key = patchesOf() ? state.shown.key : null; // which is outlined in a picture only
    if (shaded.head === state.current && shaded.query === query && shaded.key === key && shaded.colors === colors) return;
    if (patchesOf()) shadePicture(query);
    const shades = shadesOf(query);
    const tokens = textOf("keys")?.tokens ?? []; // patches of a picture are none
    for (const key of (shaded.shades || new Map()).keys()) {
      if (!shades.has(key) && tokens[key]) tokens[key].style.background = tokens[key].style.color = "";
    }
    for (const [key, color] of shades) {
      if (!tokens[key] || shaded.shades?.get(key) === color) continue;
      tokens[key].style.background = css(color);
      tokens[key].style.color = readableOn(color);
    }
    shaded = { head: state.current, query, key, colors, shades };
    markToken(textOf("queries"), query);
  }

  function markToken(text, place) {
    if (!text) return;
    const { box, tokens } = text;
    tokens[text.query]?.classList.remove("query");
    text.query = place;
    const mark = tokens[place];
    if (!mark) return; // a patch of a picture
    mark.classList.add("query");
    // Twice: parts of a long text that come into view may turn out longer or shorter than was expected.
    if (scrollTo(box, mark)) scrollTo(box, mark);
  }

  function scrollTo(box, mark) {
    const [outer, inner] = [box.getBoundingClientRect(), mark.getBoundingClientRect()];
    const top = inner.top - outer.top; // within the box
    const outside = top < 0 || top + inner.height > box.clientHeight;
    if (outside) box.scrollTop += top - 40;
    return outside;
  }

  function markSpan() {
    const text = textOf("keys");
    if (!text) return;
    const [before, after] = [text.span, (state.span && state.span.columns) || null];
    const within = (range, key) => Boolean(range) && key >= range[0] && key <= range[1];
    for (const range of [before, after]) {
      if (!range) continue;
      for (let key = range[0]; key <= Math.min(range[1], text.tokens.length - 1); key++) {
        if (within(before, key) !== within(after, key)) text.tokens[key].classList.toggle("selected", within(after, key));
      }
    }
    text.span = after;
  }

  const repeats = new WeakMap(); // names of tokens → those that come more than once

  /** A token's name; with its position where another token has the same name. */
  function numbered(names, place) {
    if (!repeats.has(names)) {
      const seen = new Set();
      repeats.set(names, new Set(names.filter((name) => seen.size === seen.add(name).size)));
    }
    return repeats.get(names).has(names[place]) ? `${names[place]} (${place})` : names[place];
  }

  function showList(query) {
    const { rows, columns } = state.current;
    const marks = differing("keys");
    const name = element("b", rows.names[query]);
    byId("list-title").replaceChildren(...(isSigned() ? [say`where `, name, say` changes most`] : [say`what `, name, say` looks at most`]));
    byId("list").replaceChildren(
      ...mostOf(query).map(({ keys, weight }) => listed(keys[0] === keys[1] ? numbered(columns.names, keys[0]) : quoted(columns.names, keys), weight, keys[0] === keys[1] && marks.has(keys[0]))),
    );
  }

  function listed(name, weight, differs = false) {
    const item = element("li");
    const bar = element("span", "", "bar");
    const filled = document.createElement("i");
    filled.style.width = Math.min(100, 100 * Math.abs(weight)) + "%";
    if (isSigned()) filled.style.background = css(colorOf(Math.sign(weight) * 0.5, 1));
    bar.append(filled);
    item.append(element("span", name, differs ? "differs" : ""), element("span", precise(weight), "weight"), bar);
    return item;
  }

  function showSum() {
    byId("sum-zoom").hidden = byId("sum-clear").hidden = !state.span;
    byId("sum").classList.toggle("quiet", !state.span);
    markSpan();
    if (!state.span) {
      byId("sum-text").textContent = hints.sum;
      return;
    }
    const rows = state.span.rows || [state.query, state.query];
    const { columns } = state.span;
    const counts = [rows, columns].map(([first, last]) => last - first + 1);
    const total = spanSum(state.current, rows, columns);
    const value = total ? (total.exact ? total.sum.toFixed(4) : say`about ${total.sum.toFixed(4)}`) : say`unknown (tiles hold largest weights):`;
    const over = counts[0] > 1 ? say`, mean over ${counts[0]} queries` : "";
    byId("sum-text").replaceChildren(
      element("b", value, "weight"),
      counts[1] > 1 ? say` sum of ${counts[1]} keys${over}: ` : say` sum of 1 key${over}: `,
      element("b", quoted(state.current.rows.names, rows)),
      " → ",
      element("b", quoted(state.current.columns.names, columns)),
    );
  }
