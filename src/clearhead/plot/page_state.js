  // ---- what is shown ------------------------------------------------------------------------------------------------

  const state = {
    number: data.compared ? data.compared.views.length - 1 : 0, // of the item
    item: null, // its description
    bytes: null, // and its numbers
    section: data.section,
    layer: data.layer,
    head: data.head,
    statistic: data.statistic,
    order: "layers", // of the overview
    words: false, // whether word pieces are to be merged
    arcs: false, // whether the largest weights are drawn over the text
    special: false, // whether special tokens are to be left out
    current: null, // the head that is large, between tokens or words
    query: 0, // kept by a click
    key: null,
    shown: { query: 0, key: null }, // under the pointer
    span: null, // selected { rows or null for the query, columns }
    anchor: null, // where the keyboard began the selection
    view: null,
    cell: 1,
    tiled: false,
  };

  async function showItem(number) {
    Object.assign(state, await unpacked(number)); // one text at a time is held unpacked, in all its views
    state.number = number;
    const { texts } = state.item;
    const heads = data.sections.flatMap((section) => section.layers.map((layer) => layer.heads.length));
    const [least, most] = [Math.min(...heads), Math.max(...heads)];
    const count = data.sections.length > 1 ? say`${heads.length} attention layers` : heads.length === 1 ? say`1 layer` : say`${heads.length} layers`;
    const perLayer = most === 1 ? say`1 head` : say`${least === most ? most : say`${least} to ${most}`} heads`;
    byId("facts").textContent =
      `${data.title} · ${count} × ${perLayer} · ` +
      sizeOfItem() +
      (data.items.length > viewCount() ? say` · text ${Math.floor(number / viewCount()) + 1} of ${data.items.length / viewCount()}` : "");
    byId("item").value = number - viewNumber();
    byId("words-control").hidden = !texts.some((text) => text.words);
    byId("special-control").hidden = !texts.some((text) => text.special.length);
    showNotes();
    showSection(state.section);
  }

  function sizeOfItem() {
    const lengths = [...new Set(state.item.texts.map(({ names }) => names.length))];
    if (!patchesOf()) return lengths.join() === "1" ? say`1 token` : say`${lengths.join(say` and `)} tokens`;
    const { grid, side } = patchesOf();
    const size = grid.join(" × ");
    return side > 1 ? say`${size} tiles of ${side} × ${side} patches` : say`${size} patches`;
  }

  function showSection(section) {
    if (section !== state.section) {
      state.section = section;
      state.layer = state.head = 0;
    }
    state.current = null;
    const { statistics } = data.sections[section];
    if (!statistics.includes(state.statistic)) state.statistic = "maps";
    for (const [index, button] of [...byId("sections").children].entries()) {
      button.setAttribute("aria-pressed", String(index === section));
    }
    byId("arcs-control").hidden = Boolean(patchesOf());
    const maps = patchesOf() ? say`over the picture` : say`maps`;
    byId("statistic").replaceChildren(
      ...[["maps", maps], ...statistics.map((name) => [name, name])].map(([name, text]) => option(name, text, name === state.statistic)),
    );
    buildOrders();
    showTitle();
    showHints();
    largeHead();
    showOverview();
    choose(state.layer, state.head);
    showAligned();
  }

  /** Read the head that is large, between tokens or words, with or without special tokens. */
  function largeHead() {
    const { section, layer, head } = state;
    let shown = headOf(state.bytes, state.item, section, layer, head);
    if (state.special && shown.complete && !isSigned()) shown = withoutSpecial(shown, specialKeys());
    if (state.words && shown.words) shown = shown.words();
    changeHead(shown);
  }

  function specialKeys() {
    return state.item.texts[state.item.sections[state.section].keys].special;
  }

  /** Whether special tokens are left out of all heads, which needs every weight of them. */
  function leavesOutSpecial() {
    return state.special && !isSigned() && state.item.sections[state.section].layers.every((layer) => tiling(layer).exact);
  }

  /** A head's layer and number; before them its kind of attention, if there is another. */
  function headName(layer, head, section = state.section) {
    const { title, layers } = data.sections[section];
    const name = say`layer ${layers[layer].label}, head ${layers[layer].heads[head]}`;
    return data.sections.length > 1 ? `${title}, ${name}` : name;
  }

  function choose(layer, head) {
    Object.assign(state, { layer, head });
    const name = headName(layer, head);
    byId("head-title").textContent = name[0].toUpperCase() + name.slice(1);
    byId("head-title").title = data.sections[state.section].layers[layer].name;
    byId("map").setAttribute("aria-label", say`Weights of ${name}. The arrow keys move from cell to cell.`);
    markChosen();
    tell(layer, head);
    drawViews();
    largeHead();
    drawMap();
    pin(state.query, state.key);
    showSum();
  }

  /** Take another head; where its rows are other tokens or words, start over or translate the place. */
  function changeHead(next) {
    const before = state.current;
    const wasWords = before && before.rows.words;
    state.current = next;
    if (!before) {
      const start = state.item.sections[state.section].start;
      [state.query, state.key] = [next.rows.words ? next.rows.words[start] : start, null];
    } else if (Boolean(wasWords) !== Boolean(next.rows.words)) {
      const translated = (from, to, place) => (from ? from.indexOf(place) : to[place]);
      state.query = translated(before.rows.words, next.rows.words, state.query);
      state.key = state.key === null ? null : translated(before.columns.words, next.columns.words, state.key);
    }
    if (!before || Boolean(wasWords) !== Boolean(next.rows.words)) {
      state.span = state.anchor = null;
      fit();
      buildTexts();
    }
    state.shown = { query: state.query, key: state.key };
  }

  /** Show a query's row, or one weight of it, for as long as the pointer is there. */
  function show(query, key) {
    state.shown = { query, key };
    showReadout(query, key);
    showCross(query, key);
    markLabel("rows", state.current.rows.names, query, "top");
    markLabel("columns", state.current.columns.names, key, "left");
    showList(query);
    shadeText(query);
    drawArcs(query);
  }

  /** Keep a query, or a cell. */
  function pin(query, key) {
    [state.query, state.key] = [query, key];
    show(query, key);
    showFinding();
    showSearch();
    writeAddress();
    if (state.span && !state.span.rows) {
      showSpan();
      showSum();
    }
  }

  function showAll() {
    const { rows, columns } = state.current;
    setView(0, 0, rows.names.length, columns.names.length);
    show(state.query, state.key);
  }

  function redraw() {
    readColors();
    drawOverview();
    drawViews();
    drawMap();
    show(state.query, state.key);
  }
