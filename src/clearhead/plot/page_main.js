  // ---- what is shown, and the controls --------------------------------------------------------------------------

  const state = {
    number: data.compared ? data.compared.views.length - 1 : 0, // of the item
    item: null, // its description
    bytes: null, // and its numbers
    section: data.section,
    layer: data.layer,
    head: data.head,
    statistic: data.statistic,
    words: false, // whether word pieces are to be merged
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
    const texts = state.item.texts.length;
    const length = state.item.sections.map((section) => state.item.texts[section.queries].names.length);
    const heads = data.sections.flatMap((section) => section.layers.map((layer) => layer.heads.length));
    const [least, most] = [Math.min(...heads), Math.max(...heads)];
    const what = data.sections.length > 1 ? "attention layers" : "layers";
    byId("facts").textContent =
      `${data.title} · ${heads.length} ${what} × ${least === most ? most : least + " to " + most} heads · ` +
      (texts > 1 ? [...new Set(state.item.texts.map((text) => text.names.length))].join(" and ") : length[0]) + " tokens" +
      (data.items.length > viewCount() ? ` · text ${Math.floor(number / viewCount()) + 1} of ${data.items.length / viewCount()}` : "");
    byId("words-control").hidden = !state.item.texts.some((text) => text.words);
    showSection(state.section);
  }

  function showSection(section) {
    if (section !== state.section) {
      state.section = section;
      state.layer = state.head = 0;
    }
    state.current = null;
    if (!data.sections[section].statistics.includes(state.statistic)) state.statistic = "maps";
    for (const [index, button] of [...byId("sections").children].entries()) {
      button.setAttribute("aria-pressed", String(index === section));
    }
    byId("statistic").replaceChildren(
      ...["maps", ...data.sections[section].statistics].map((name) => {
        const option = element("option", name === "maps" && patchesOf() ? "over the picture" : name);
        option.value = name;
        option.selected = name === state.statistic;
        return option;
      }),
    );
    buildOverview();
    drawOverview();
    choose(state.layer, state.head);
  }

  function choose(layer, head) {
    state.layer = layer;
    state.head = head;
    const { label, name, heads } = data.sections[state.section].layers[layer];
    const kind = data.sections.length > 1 ? data.sections[state.section].title + ", " : "";
    const title = `${kind}layer ${label}, head ${heads[head]}`;
    byId("head-title").textContent = title[0].toUpperCase() + title.slice(1);
    byId("head-title").title = name;
    byId("map").setAttribute("aria-label", `Weights of layer ${label}, head ${heads[head]}. The arrow keys move from cell to cell.`);
    markChosen();
    tell(layer, head);
    drawViews();
    const found = headOf(state.bytes, state.item, state.section, layer, head);
    changeHead(state.words && found.words ? found.words() : found);
  }

  /** Show another head; where its rows are other tokens or words, start over or translate the place. */
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
    drawMap();
    show(state.query, state.key);
    showSum();
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
  }

  function pin(query, key) {
    [state.query, state.key] = [query, key];
    show(query, key);
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

  function buildControls() {
    const views = viewCount();
    data.items.forEach((item, number) => {
      if (number % views) return; // another view of the same text
      const option = element("option", item.label);
      option.value = number;
      byId("item").append(option);
    });
    byId("item-control").hidden = data.items.length < 2 * views;
    data.sections.forEach((section, index) => {
      const button = element("button", section.title);
      button.type = "button";
      button.addEventListener("click", () => showSection(index));
      byId("sections").append(button);
    });
    byId("sections").hidden = data.sections.length < 2;
  }

  function listen() {
    byId("item").addEventListener("change", (event) => showItem(Number(event.target.value) + viewNumber()));
    byId("words").addEventListener("change", (event) => {
      state.words = event.target.checked;
      choose(state.layer, state.head);
    });
    byId("statistic").addEventListener("change", (event) => {
      state.statistic = event.target.value;
      drawOverview();
      drawMap();
      tell(state.layer, state.head);
    });
    byId("zoom-in").addEventListener("click", () => zoomHere(0.5));
    byId("zoom-out").addEventListener("click", () => zoomHere(2));
    byId("zoom-fit").addEventListener("click", showAll);
    byId("sum-zoom").addEventListener("click", zoomToSpan);
    byId("sum-clear").addEventListener("click", unselect);
    listenToMap();
    addEventListener("keydown", (event) => event.key === "Escape" && state.span && unselect());
    dark.addEventListener("change", redraw);
    let resizing = 0;
    addEventListener("resize", () => {
      cancelAnimationFrame(resizing);
      resizing = requestAnimationFrame(redraw);
    });
  }

  byId("notes").textContent = data.notes.join(" ");
  byId("notes").hidden = !data.notes.length;
  buildControls();
  buildViews();
  listen();
  await showItem(viewNumber());
  drawViews();
  document.documentElement.dataset.ready = "true";
