"use strict";
(async () => {
  const LIGHT = ["#ffffff", "#dbe7ee", "#a9c8d8", "#6ea3bf", "#3a7aa3", "#1d5281", "#122c55", "#0a1230"];
  const DARK = ["#171c23", "#1d2c3b", "#244660", "#2b6584", "#3f88a3", "#6aabb4", "#a9cfc6", "#f6f3dc"];
  const TICKS = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
  const THUMBNAIL = 48;
  const SMALLEST_CELL = 3;
  const LARGEST_CELL = 40;
  const LONGEST_LABEL = 16;
  const LISTED = 8;

  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const { tokens, keys, unit } = data;
  const weights = await unpack(data.weights);
  const starts = firstHeads(data.heads);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const state = { layer: data.layer, head: data.head, query: data.query, key: null, cell: 0 };
  let colors = shades();

  // ---- numbers ---------------------------------------------------------------------------------------------

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint16Array(await new Response(stream).arrayBuffer());
  }

  function firstHeads(heads) {
    let next = 0;
    return heads.map((layer) => (next += layer.length) - layer.length);
  }

  function weightsOf(layer, head) {
    const size = tokens.length * keys.length;
    const first = (starts[layer] + head) * size;
    return weights.subarray(first, first + size);
  }

  function row(query) {
    const first = query * keys.length;
    return weightsOf(state.layer, state.head).subarray(first, first + keys.length);
  }

  function written(value) {
    return value === 0 ? "< " + (1 / unit).toFixed(4) : (value / unit).toFixed(4);
  }

  // ---- colour ----------------------------------------------------------------------------------------------

  function shades() {
    const stops = (dark.matches ? DARK : LIGHT).map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
    const table = new Uint32Array(256);
    for (let level = 0; level < 256; level++) {
      const place = (level / 255) * (stops.length - 1);
      const low = Math.min(Math.floor(place), stops.length - 2);
      const mix = (i) => Math.round(stops[low][i] + (stops[low + 1][i] - stops[low][i]) * (place - low));
      table[level] = (255 << 24) | (mix(2) << 16) | (mix(1) << 8) | mix(0);
    }
    return table;
  }

  function level(value) {
    return Math.min(255, Math.round(255 * Math.sqrt(value / unit)));
  }

  function css(color) {
    return `rgb(${color & 255} ${(color >> 8) & 255} ${(color >> 16) & 255})`;
  }

  function readableOn(color) {
    const light = 0.299 * (color & 255) + 0.587 * ((color >> 8) & 255) + 0.114 * ((color >> 16) & 255);
    return light > 140 ? "#10151c" : "#ffffff";
  }

  // ---- the scale -------------------------------------------------------------------------------------------

  function drawScale() {
    const context = byId("ramp").getContext("2d");
    const image = context.createImageData(256, 1);
    new Uint32Array(image.data.buffer).set(colors);
    context.putImageData(image, 0, 0);
    byId("ticks").replaceChildren(
      ...TICKS.map((tick) => {
        const label = element("span", String(tick));
        label.style.left = 100 * Math.sqrt(tick) + "%";
        return label;
      }),
    );
  }

  // ---- all heads -------------------------------------------------------------------------------------------

  function buildOverview() {
    const columns = Math.max(...data.heads.map((layer) => layer.length));
    const overview = byId("overview");
    overview.style.gridTemplateColumns = `1.6rem repeat(${columns}, minmax(14px, 1fr))`;
    const header = element("div", "", "row");
    header.setAttribute("role", "row");
    header.append(named("columnheader", ""));
    for (let head = 0; head < columns; head++) header.append(named("columnheader", String(head)));
    overview.append(header);
    data.heads.forEach((layer, index) => overview.append(buildLayer(layer, index, columns)));
  }

  function named(role, text) {
    const name = element("div", text, "name");
    name.setAttribute("role", role);
    return name;
  }

  function buildLayer(layer, index, columns) {
    const line = element("div", "", "row");
    line.setAttribute("role", "row");
    line.append(named("rowheader", String(index)));
    for (let head = 0; head < columns; head++) {
      const cell = document.createElement("div");
      cell.setAttribute("role", "gridcell");
      if (head < layer.length) cell.append(buildThumbnail(index, head));
      line.append(cell);
    }
    return line;
  }

  function buildThumbnail(layer, head) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.place = layer + "-" + head;
    button.setAttribute("aria-label", describe(layer, head));
    button.append(document.createElement("canvas"));
    button.addEventListener("click", () => choose(layer, head));
    button.addEventListener("keydown", (event) => walkHeads(event, layer, head));
    for (const name of ["mouseenter", "focus"]) button.addEventListener(name, () => tell(layer, head));
    button.addEventListener("mouseleave", () => tell(state.layer, state.head));
    return button;
  }

  function describe(layer, head) {
    const { entropy, kind } = data.heads[layer][head];
    return `Layer ${layer}, head ${head}: mean entropy ${entropy.toFixed(2)} nats; looks mostly at ${kind}`;
  }

  function tell(layer, head) {
    byId("about").textContent = describe(layer, head);
  }

  function drawThumbnails() {
    data.heads.forEach((layer, index) => layer.forEach((_, head) => drawThumbnail(index, head)));
  }

  function drawThumbnail(layer, head) {
    const canvas = thumbnail(layer, head).firstChild;
    const height = Math.min(tokens.length, THUMBNAIL);
    const width = Math.min(keys.length, THUMBNAIL);
    const largest = new Uint16Array(height * width);
    const values = weightsOf(layer, head);
    for (let query = 0, at = 0; query < tokens.length; query++) {
      const line = Math.floor((query * height) / tokens.length) * width;
      for (let key = 0; key < keys.length; key++, at++) {
        const place = line + Math.floor((key * width) / keys.length);
        if (values[at] > largest[place]) largest[place] = values[at];
      }
    }
    canvas.width = width;
    canvas.height = height;
    paint(canvas, largest);
  }

  function paint(canvas, values) {
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    const pixels = new Uint32Array(image.data.buffer);
    for (let at = 0; at < values.length; at++) pixels[at] = colors[level(values[at])];
    context.putImageData(image, 0, 0);
  }

  function thumbnail(layer, head) {
    return document.querySelector(`[data-place="${layer}-${head}"]`);
  }

  function walkHeads(event, layer, head) {
    const step = arrow(event);
    if (!step) return;
    event.preventDefault();
    const nextLayer = clamp(layer + step.down, data.heads.length);
    const nextHead = clamp(head + step.right, data.heads[nextLayer].length);
    choose(nextLayer, nextHead);
    thumbnail(nextLayer, nextHead).focus();
  }

  function choose(layer, head) {
    state.layer = layer;
    state.head = head;
    for (const button of document.querySelectorAll("#overview button")) {
      const chosen = button.dataset.place === layer + "-" + head;
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
    byId("head-title").textContent = `Layer ${layer}, head ${head}`;
    byId("map").setAttribute(
      "aria-label",
      `Weights of layer ${layer}, head ${head}. The arrow keys move from cell to cell.`,
    );
    tell(layer, head);
    drawMap();
    point(state.query, state.key);
  }

  // ---- one head --------------------------------------------------------------------------------------------

  function drawMap() {
    const wide = byId("frame").parentElement.clientWidth - labelWidth(tokens) - 24;
    const room = Math.max(220, Math.min(wide, 900));
    const fitting = Math.floor(room / Math.max(tokens.length, keys.length));
    state.cell = Math.max(SMALLEST_CELL, Math.min(LARGEST_CELL, fitting));
    const values = weightsOf(state.layer, state.head);
    const small = document.createElement("canvas");
    small.width = keys.length;
    small.height = tokens.length;
    paint(small, values);
    const canvas = byId("cells");
    const ratio = Math.max(1, Math.round(devicePixelRatio));
    canvas.width = keys.length * state.cell * ratio;
    canvas.height = tokens.length * state.cell * ratio;
    canvas.style.width = keys.length * state.cell + "px";
    canvas.style.height = tokens.length * state.cell + "px";
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, canvas.width, canvas.height);
    placeLabels();
  }

  function placeLabels() {
    byId("rows").style.width = labelWidth(tokens) + "px";
    byId("columns").style.height = labelWidth(keys) + "px";
    const step = Math.ceil(15 / state.cell);
    for (const [id, names, side] of [["rows", tokens, "top"], ["columns", keys, "left"]]) {
      const labels = [];
      for (let place = 0; place < names.length; place += step) labels.push(label(names, place, side));
      byId(id).replaceChildren(...labels);
    }
  }

  function label(names, place, side) {
    const mark = element("span", shortened(names[place]));
    mark.style[side] = (place + 0.5) * state.cell + "px";
    mark.dataset.place = place;
    return mark;
  }

  function labelWidth(names) {
    const widths = names.map((name) => [...shortened(name)].reduce((sum, c) => sum + (c > "\u1100" ? 14 : 7.6), 0));
    return Math.ceil(Math.max(...widths)) + 14;
  }

  function shortened(name) {
    const characters = [...name];
    return characters.length > LONGEST_LABEL ? characters.slice(0, LONGEST_LABEL - 1).join("") + "…" : name;
  }

  function point(query, key) {
    state.query = query;
    state.key = key;
    showReadout(query, key);
    showCross(query, key);
    markLabel("rows", tokens, query, "top");
    markLabel("columns", keys, key, "left");
    showList(query);
    shadeSentence(query);
  }

  function showReadout(query, key) {
    const values = row(query);
    const shown = key === null ? values.indexOf(Math.max(...values)) : key;
    byId("readout").replaceChildren(
      element("b", tokens[query]),
      key === null ? " looks most at " : " → ",
      element("b", keys[shown]),
      " ",
      element("span", written(values[shown]), "weight"),
    );
  }

  function showCross(query, key) {
    const cross = byId("cross");
    cross.hidden = false;
    cross.style.top = query * state.cell + "px";
    cross.style.left = (key === null ? 0 : key * state.cell) + "px";
    cross.style.height = state.cell + "px";
    cross.style.width = (key === null ? keys.length : 1) * state.cell + "px";
  }

  function markLabel(id, names, place, side) {
    const box = byId(id);
    for (const old of box.querySelectorAll(".extra")) old.remove();
    for (const old of box.querySelectorAll(".active")) old.classList.remove("active");
    if (place === null) return;
    let mark = box.querySelector(`[data-place="${place}"]`);
    if (!mark) {
      mark = label(names, place, side);
      mark.classList.add("extra");
      box.append(mark);
    }
    mark.classList.add("active");
  }

  function showList(query) {
    const values = row(query);
    const order = [...values.keys()].sort((a, b) => values[b] - values[a]).slice(0, LISTED);
    byId("list-title").replaceChildren("what ", element("b", tokens[query]), " looks at most");
    byId("list").replaceChildren(...order.map((key) => listed(keys[key], values[key])));
  }

  function listed(name, value) {
    const item = document.createElement("li");
    const bar = element("span", "", "bar");
    const filled = document.createElement("i");
    filled.style.width = Math.min(100, (100 * value) / unit) + "%";
    bar.append(filled);
    item.append(element("span", name), element("span", written(value), "weight"), bar);
    return item;
  }

  // ---- the text --------------------------------------------------------------------------------------------

  function buildSentence() {
    const spans = keys.map((name, place) => {
      const span = element("span", name);
      if (data.same) span.addEventListener("mouseenter", () => point(place, null));
      return span;
    });
    byId("sentence").replaceChildren(...spans);
  }

  function shadeSentence(query) {
    const values = row(query);
    [...byId("sentence").children].forEach((span, key) => {
      const color = colors[level(values[key])];
      span.style.background = css(color);
      span.style.color = readableOn(color);
      span.classList.toggle("query", data.same && key === query);
    });
  }

  // ---- pointer and keyboard --------------------------------------------------------------------------------

  function cellUnder(event) {
    const box = byId("cells").getBoundingClientRect();
    return [
      clamp(Math.floor((event.clientY - box.top) / state.cell), tokens.length),
      clamp(Math.floor((event.clientX - box.left) / state.cell), keys.length),
    ];
  }

  function walkCells(event) {
    const step = arrow(event);
    if (!step) return;
    event.preventDefault();
    const key = state.key === null ? 0 : clamp(state.key + step.right, keys.length);
    point(clamp(state.query + step.down, tokens.length), key);
    byId("cross").scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  function arrow(event) {
    return {
      ArrowUp: { down: -1, right: 0 },
      ArrowDown: { down: 1, right: 0 },
      ArrowLeft: { down: 0, right: -1 },
      ArrowRight: { down: 0, right: 1 },
    }[event.key];
  }

  function clamp(index, count) {
    return Math.max(0, Math.min(count - 1, index));
  }

  function element(name, text, kind = "") {
    const result = document.createElement(name);
    result.textContent = text;
    result.className = kind;
    result.dir = "auto";
    return result;
  }

  function drawAll() {
    colors = shades();
    drawScale();
    drawThumbnails();
    choose(state.layer, state.head);
  }

  byId("facts").textContent = data.facts;
  buildOverview();
  buildSentence();
  drawAll();
  byId("map").addEventListener("pointermove", (event) => point(...cellUnder(event)));
  byId("map").addEventListener("pointerdown", (event) => point(...cellUnder(event)));
  byId("map").addEventListener("keydown", walkCells);
  dark.addEventListener("change", drawAll);
  addEventListener("resize", () => choose(state.layer, state.head));
  document.documentElement.dataset.ready = "true";
})();
