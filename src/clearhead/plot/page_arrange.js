  // ---- the order of all heads ----------------------------------------------------------------------------------
  // A row of the overview has a name and heads, each as places of its layer and of the head in it.

  const LEAST_COLUMNS = 6;
  const ORDERS = { layers: say`by layer`, kinds: say`by what they look at`, asked: say`by the weight asked for` };

  function eachHead(visit) {
    data.sections[state.section].layers.forEach((layer, index) => layer.heads.forEach((_, head) => visit(index, head)));
  }

  function allHeads() {
    const heads = [];
    eachHead((layer, head) => heads.push([layer, head]));
    return heads;
  }

  function columnCount() {
    return Math.max(...data.sections[state.section].layers.map((layer) => layer.heads.length));
  }

  /** Heads stand by layer too while there is no question that they could be ordered by. */
  function isByLayer() {
    return state.order === "layers" || (state.order === "asked" && state.key === null);
  }

  function arranged() {
    const { layers } = data.sections[state.section];
    if (isByLayer()) {
      return layers.map((layer, index) => ({ name: layer.label, title: layer.name, heads: layer.heads.map((_, head) => [index, head]) }));
    }
    if (state.order === "kinds") return grouped();
    const value = state.order === "asked" ? askedValues() : (layer, head) => valueOf(layer, head, state.order) ?? -Infinity;
    const size = isSigned() ? Math.abs : (number) => number;
    const heads = allHeads().sort((a, b) => size(value(...b)) - size(value(...a)));
    return rowsOf(heads);
  }

  /** One heading per kind of head, the most frequent kind first, and rows of its heads below it. */
  function grouped() {
    const kinds = new Map();
    eachHead((layer, head) => {
      const kind = state.item.sections[state.section].layers[layer].kinds[head];
      if (!kinds.has(kind)) kinds.set(kind, []);
      kinds.get(kind).push([layer, head]);
    });
    return [...kinds]
      .sort((a, b) => b[1].length - a[1].length)
      .flatMap(([kind, heads]) => {
        const count = heads.length === 1 ? say`1 head` : say`${heads.length} heads`;
        return [{ heading: `${kind} · ${count}`, heads: [] }, ...rowsOf(heads)];
      });
  }

  /** Heads in rows of equal length, named by the rank of their first head. */
  function rowsOf(heads) {
    const columns = Math.max(LEAST_COLUMNS, columnCount());
    const rows = [];
    for (let first = 0; first < heads.length; first += columns) {
      rows.push({ name: String(first + 1), title: say`rank`, heads: heads.slice(first, first + columns) });
    }
    return rows;
  }

  /** The orders there are: layers, kinds, the weight asked for, and every statistic. */
  function buildOrders() {
    const orders = Object.entries(ORDERS).filter(([name]) => name !== "kinds" || !isSigned());
    const { statistics } = data.sections[state.section];
    const names = [...orders, ...statistics.map((name) => [name, say`by ${name}`])];
    if (!names.some(([name]) => name === state.order)) state.order = "layers";
    byId("order").replaceChildren(...names.map(([name, text]) => option(name, text, name === state.order)));
  }

  function option(value, text, selected = false) {
    const result = element("option", text);
    result.value = value;
    result.selected = selected;
    return result;
  }
