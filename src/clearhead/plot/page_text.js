  // ---- the text, and what one token looks at -----------------------------------------------------------------

  let shaded = {};

  function isSame() {
    return data.sections[state.section].same;
  }

  /** One text where it looks at itself; else the text that looks and the text that is looked at. */
  function buildTexts() {
    const { rows, columns } = state.current;
    shaded = {};
    if (patchesOf()) {
      buildPicture();
    } else if (isSame()) {
      byId("texts").replaceChildren(buildText("both", columns, "The text"));
    } else {
      byId("texts").replaceChildren(
        element("p", "looks", "quiet side"),
        buildText("queries", rows, "The text that looks"),
        element("p", "is looked at", "quiet side"),
        buildText("keys", columns, "The text that is looked at"),
      );
    }
  }

  function buildText(side, axis, title) {
    const box = element("p", "", "text " + side);
    box.tabIndex = 0;
    box.setAttribute("role", "application");
    box.setAttribute("aria-label", title + ", token by token");
    axis.names.forEach((name, place) => {
      const span = element("span", name);
      span.dataset.place = place;
      box.append(span);
    });
    listenToText(box, side);
    return box;
  }

  function textOf(side) {
    return document.querySelector(`.text.${side}`) || document.querySelector(".text.both");
  }

  /** The weights of a row, as far as they are known one by one. */
  function knownRow(query) {
    const { columns, grids, largest, whole } = state.current;
    const weights = new Float64Array(columns.names.length);
    if (whole) weights.forEach((_, key) => (weights[key] = weightAt(grids[0], query, key)));
    else for (const { key, weight } of largest(query)) weights[key] = weight;
    return weights;
  }

  function shadeText(query) {
    const key = patchesOf() ? state.shown.key : null; // which is outlined in a picture only
    if (shaded.head === state.current && shaded.query === query && shaded.key === key && shaded.colors === colors) return;
    shaded = { head: state.current, query, key, colors };
    if (patchesOf()) shadePicture(query);
    const weights = knownRow(query);
    const { cellEnd } = scaleEnds();
    [...(textOf("keys")?.children ?? [])].forEach((span, key) => {
      const color = colorOf(weights[key], cellEnd);
      span.style.background = weights[key] ? css(color) : "";
      span.style.color = weights[key] ? readableOn(color) : "";
    });
    markToken(textOf("queries"), query);
  }

  function markToken(box, place) {
    if (!box) return;
    box.querySelector(".query")?.classList.remove("query");
    const mark = box.children[place];
    if (!mark) return; // a patch of a picture
    mark.classList.add("query");
    const [top, height] = [mark.offsetTop, mark.offsetHeight]; // within the box
    if (top < box.scrollTop || top + height > box.scrollTop + box.clientHeight) box.scrollTop = top - 40;
  }

  function markSpan() {
    const span = state.span && state.span.columns;
    [...(textOf("keys")?.children ?? [])].forEach((mark, key) => {
      mark.classList.toggle("selected", Boolean(span && key >= span[0] && key <= span[1]));
    });
  }

  function showList(query) {
    const { rows, columns, largest } = state.current;
    byId("list-title").replaceChildren(
      ...(isSigned() ? ["where ", element("b", rows.names[query]), " changes most"] : ["what ", element("b", rows.names[query]), " looks at most"]),
    );
    byId("list").replaceChildren(...largest(query).map(({ key, weight }) => listed(columns.names[key], weight)));
  }

  function listed(name, weight) {
    const item = element("li");
    const bar = element("span", "", "bar");
    const filled = document.createElement("i");
    filled.style.width = Math.min(100, 100 * Math.abs(weight)) + "%";
    bar.append(filled);
    item.append(element("span", name), element("span", precise(weight), "weight"), bar);
    return item;
  }

  // ---- what is under the pointer, in words -------------------------------------------------------------------

  function showReadout(query, key) {
    const { rows, columns, largest } = state.current;
    const best = largest(query)[0];
    if (key === null && !best) {
      byId("readout").replaceChildren(element("b", rows.names[query]), " sees nothing");
      byId("details").textContent = "";
      return;
    }
    const at = key === null ? best.key : key;
    const found = look(state.current, query, at);
    byId("readout").replaceChildren(
      element("b", rows.names[query]),
      key === null ? (isSigned() ? " changes most at " : " looks most at ") : " → ",
      element("b", columns.names[at]),
      " ",
      element("span", found.tile === undefined ? (found.rounded ? "about " : "") + precise(found.weight) : tileText(found), "weight"),
    );
    showDetails(query, at);
  }

  function tileText({ tile, pooling, queries, keys }) {
    const across = keys[1] - keys[0] + 1;
    if (pooling === "max") return `at most ${precise(tile)} (the largest weight of its tile)`;
    return `about ${precise(tile / across)} (its tile, keys ${keys[0]}–${keys[1]}, has ${precise(tile)})`;
  }

  function showDetails(query, key) {
    if (isSigned()) return showChange(query, key);
    const { rows, columns, entropy, received } = state.current;
    const share = received[key] / rows.names.length;
    byId("details").textContent =
      `query ${query} · entropy ${entropy[query].toFixed(2)} nats   ·   ` +
      `key ${key} · receives ${brief(received[key])} from ${rows.names.length} queries, ${(100 * share).toFixed(1)} %` +
      ` (${(100 / columns.names.length).toFixed(1)} % if all were alike)`;
  }

  function quoted(names, [first, last]) {
    const part = names.slice(first, last + 1);
    return part.length > 6 ? `${part.slice(0, 2).join(" ")} … ${part.slice(-2).join(" ")}` : part.join(" ");
  }

  function showSum() {
    byId("sum-zoom").hidden = byId("sum-clear").hidden = !state.span;
    byId("sum").classList.toggle("quiet", !state.span);
    markSpan();
    if (!state.span) {
      byId("sum-text").textContent = "Drag over the map or the text to add up weights.";
      return;
    }
    const rows = state.span.rows || [state.query, state.query];
    const { columns } = state.span;
    const counts = [rows, columns].map(([first, last]) => last - first + 1);
    const found = spanSum(state.current, rows, columns);
    const value = found ? (found.exact ? "" : "about ") + found.sum.toFixed(4) : "unknown (tiles hold largest weights):";
    const over = counts[0] > 1 ? `, mean over ${counts[0]} queries` : "";
    byId("sum-text").replaceChildren(
      element("b", value, "weight"),
      ` sum of ${counts[1]} key${counts[1] > 1 ? "s" : ""}${over}: `,
      element("b", quoted(state.current.rows.names, rows)),
      " → ",
      element("b", quoted(state.current.columns.names, columns)),
    );
  }
