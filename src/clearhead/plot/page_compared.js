  // ---- two side by side: the views of a comparison ------------------------------------------------------------

  const VIEW_PIXELS = 150;
  const otherViews = new Map(); // number → an item, unpacked, beside the one that is shown

  async function viewOf(number) {
    const first = state.number - viewNumber();
    for (const known of otherViews.keys()) if (known < first || known >= first + viewCount()) otherViews.delete(known);
    if (!otherViews.has(number)) otherViews.set(number, await unpacked(number));
    return otherViews.get(number);
  }

  /** Whether what is shown is a difference. */
  function isSigned() {
    return Boolean(state.item && state.item.sections[state.section].layers[0].signed);
  }

  function scaleEnds(signed = isSigned()) {
    const ends = data.sections[state.section];
    if (!signed) return ends;
    return { tileEnd: ends.changedTileEnd, finerEnd: ends.changedFinerEnd, cellEnd: ends.changedCellEnd };
  }

  /** How many views there are of every text. */
  function viewCount() {
    return data.compared ? data.compared.views.length : 1;
  }

  function viewNumber() {
    return state.number % viewCount();
  }

  function buildViews() {
    if (!data.compared) return;
    const { views, note, by, ranked } = data.compared;
    byId("compared-note").textContent = note;
    byId("views").replaceChildren(...views.map(buildView));
    const scores = by === "divergence" ? say`their Jensen–Shannon divergence in nats` : say`the change of their ${by}`;
    byId("ranked-title").textContent = say`heads that differ most, by ${scores}`;
    byId("ranked-list").replaceChildren(...ranked.map(([section, layer, head, score]) => rankedHead([section, layer, head], score.toFixed(3))));
    for (const id of ["compared-note", "views", "ranked"]) byId(id).hidden = false;
  }

  const SHORT = 24; // characters

  /** What one of the two is called where there is little room: its own name, or its place. */
  function shortName(view) {
    const name = data.compared.views[view];
    return name.length <= SHORT ? name : view ? say`second` : say`first`;
  }

  function buildView(name, view) {
    const button = element("button");
    button.type = "button";
    const label = view < 2 && shortName(view) !== name ? `${shortName(view)}: ${name}` : name;
    button.append(document.createElement("canvas"), element("span", label));
    button.title = name;
    button.addEventListener("click", () => showView(view));
    return button;
  }

  /** Draw the chosen head in every view, small. */
  async function drawViews() {
    if (!data.compared) return;
    const first = state.number - viewNumber();
    const { layer, head, section } = state;
    for (const [view, button] of [...byId("views").children].entries()) {
      const shown = await viewOf(first + view);
      if (state.layer !== layer || state.head !== head || state.section !== section) return; // another was chosen since
      paintHead(button.firstChild, shown, layer, head, VIEW_PIXELS);
      button.setAttribute("aria-pressed", String(view === viewNumber()));
    }
    if (isSigned()) showReadout(state.shown.query, state.shown.key); // the weights of both are known now
  }

  /** Show another view of the same head, at the same tokens. */
  async function showView(view) {
    const from = viewNumber();
    const { query, key } = state;
    const isWords = Boolean(state.current.rows.words);
    const part = { ...state.view };
    const sizes = [state.current.rows.names.length, state.current.columns.names.length];
    const { layer, head, section } = state;
    await showItem(state.number - from + view);
    if (state.section === section && (state.layer !== layer || state.head !== head)) choose(layer, head);
    if (isWords || state.current.rows.words) return;
    const next = [counterpart("queries", query, from, view), key === null ? null : counterpart("keys", key, from, view)];
    if (sizes[0] === state.current.rows.names.length && sizes[1] === state.current.columns.names.length) {
      setView(part.row, part.column, part.rows, part.columns);
    }
    if (next[0] !== null) pin(next[0], next[1]);
  }

  /** Where a token of one view stands in another, or null. */
  function counterpart(side, place, from, to) {
    const places = placesOf(side);
    const { rows, columns } = state.current;
    if (!places) return place < (side === "queries" ? rows : columns).names.length ? place : null;
    const index = from === 2 ? place : places[from].indexOf(place);
    return index < 0 ? null : to === 2 ? index : places[to][index];
  }

  function placesOf(side) {
    const places = data.compared.places[state.number - viewNumber() + 2];
    return places ? places[state.section][side] : null;
  }

  /** Places of the tokens that the other text does not have. */
  function differing(side) {
    const places = data.compared && viewNumber() < 2 ? placesOf(side) : null;
    if (!places || state.current.rows.words) return new Set();
    const shared = new Set(places[viewNumber()]);
    const axis = side === "queries" ? state.current.rows : state.current.columns;
    return new Set([...axis.names.keys()].filter((place) => !shared.has(place)));
  }

  function describeChange(layer, head) {
    const { label, heads } = data.sections[state.section].layers[layer];
    const { numbers } = state.item.sections[state.section].layers[layer];
    const told = toldStatistic();
    const shown = told ? say`; ${told} changes by ${withSign(valueText(layer, head, told))}` : "";
    const change = say`mean entropy changes by ${withSign(brief(numbers.entropy[head]))} nats`;
    return say`Layer ${label}, head ${heads[head]}: divergence ${numbers.divergence[head].toFixed(3)} nats; ${change}${shown}`;
  }

  /** The weight in the first and in the second, beside their difference. */
  function showChange(query, key) {
    const { entropy, received } = state.current;
    const first = state.number - viewNumber();
    const texts = [0, 1].map((view) => {
      const other = otherViews.get(first + view);
      const places = ["queries", "keys"].map((side, at) => placesOf(side)[view][at ? key : query]);
      if (!other || state.current.rows.words) return "";
      const cell = look(headOf(other.bytes, other.item, state.section, state.layer, state.head), ...places);
      const weight = cell.tile === undefined ? precise(cell.weight, false) : say`in a tile of ${precise(cell.tile, false)}`;
      return `${shortName(view)} ${weight}   ·   `;
    });
    byId("details").textContent =
      texts.join("") +
      say`query ${query} · entropy ${withSign(entropy[query].toFixed(2))} nats` +
      "   ·   " +
      say`key ${key} · receives ${withSign(brief(received[key]))}`;
  }
