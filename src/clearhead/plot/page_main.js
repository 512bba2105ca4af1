  // ---- the controls, and the first look ------------------------------------------------------------------------------

  function buildControls() {
    const views = viewCount();
    data.items.forEach((item, number) => {
      if (number % views === 0) byId("item").append(option(number, item.label)); // others are views of the same text
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

  function listenToControls() {
    byId("item").addEventListener("change", (event) => showItem(Number(event.target.value) + viewNumber()));
    for (const [id, answer] of [["words", () => {}], ["special", showStatistic]]) {
      byId(id).addEventListener("change", (event) => {
        state[id] = event.target.checked;
        choose(state.layer, state.head);
        answer();
      });
    }
    byId("arcs").addEventListener("change", (event) => {
      state.arcs = event.target.checked;
      show(state.query, state.key);
    });
    for (const [name, answer] of [["statistic", showStatistic], ["order", showOverview]]) {
      byId(name).addEventListener("change", (event) => {
        state[name] = event.target.value;
        answer();
      });
    }
    byId("zoom-in").addEventListener("click", () => zoomHere(0.5));
    byId("zoom-out").addEventListener("click", () => zoomHere(2));
    byId("zoom-fit").addEventListener("click", showAll);
    byId("sum-zoom").addEventListener("click", zoomToSpan);
    byId("sum-clear").addEventListener("click", unselect);
  }

  function listenToWindow() {
    addEventListener("keydown", (event) => event.key === "Escape" && state.span && unselect());
    addEventListener("hashchange", followAddress);
    let resizing = 0;
    addEventListener("resize", () => {
      cancelAnimationFrame(resizing);
      resizing = requestAnimationFrame(redraw);
    });
  }

  document.documentElement.dataset.script = "true";
  buildControls();
  buildViews();
  if (!(await followAddress())) await showItem(viewNumber());
  // Only now: a telephone resizes the page while its numbers are still packed, and nothing can be drawn without them.
  for (const listen of [listenToControls, listenToTheme, listenToOverview, listenToSearch, listenToMap, listenToSave, listenToWindow]) listen();
  drawViews();
  listenToNotebook();
  document.documentElement.dataset.ready = "true";
