  // ---- all heads -------------------------------------------------------------------------------------------

  const THUMBNAIL = 56;
  const thumbnails = new Map(); // by layer and head, of one section

  function buildOverview() {
    thumbnails.clear();
    const { layers } = data.sections[state.section];
    const columns = Math.max(...layers.map((layer) => layer.heads.length));
    const overview = byId("overview");
    overview.style.gridTemplateColumns = `1.8rem repeat(${columns}, minmax(14px, 1fr))`;
    const header = element("div", "", "row");
    header.setAttribute("role", "row");
    header.append(named("cell", ""));
    for (let place = 0; place < columns; place++) header.append(named("columnheader", String(layers[0].heads[place] ?? place)));
    overview.replaceChildren(header, ...layers.map((layer, index) => buildLayer(layer, index, columns)));
  }

  function named(role, text) {
    const name = element("div", text, "name");
    name.setAttribute("role", role);
    return name;
  }

  function buildLayer(layer, index, columns) {
    const line = element("div", "", "row");
    line.setAttribute("role", "row");
    const name = named("rowheader", layer.label);
    name.title = layer.name;
    line.append(name);
    for (let head = 0; head < columns; head++) {
      const cell = document.createElement("div");
      cell.setAttribute("role", "gridcell");
      if (head < layer.heads.length) cell.append(buildThumbnail(index, head));
      line.append(cell);
    }
    return line;
  }

  function buildThumbnail(layer, head) {
    const button = element("button");
    button.type = "button";
    button.dataset.place = layer + "-" + head;
    thumbnails.set(button.dataset.place, button);
    button.append(document.createElement("canvas"), element("span"));
    button.addEventListener("click", () => choose(layer, head));
    button.addEventListener("keydown", (event) => walkHeads(event, layer, head));
    for (const name of ["mouseenter", "focus"]) button.addEventListener(name, () => tell(layer, head));
    button.addEventListener("mouseleave", () => tell(state.layer, state.head));
    return button;
  }

  function thumbnail(layer, head) {
    return thumbnails.get(layer + "-" + head);
  }

  function describe(layer, head) {
    const { label, heads } = data.sections[state.section].layers[layer];
    if (isSigned()) return describeChange(layer, head);
    const { numbers, kinds } = state.item.sections[state.section].layers[layer];
    const entropy = numbers.entropy ? `mean entropy ${brief(numbers.entropy[head])} nats; ` : "";
    const shown = state.statistic === "maps" || state.statistic === "entropy" ? "" : `; ${state.statistic} ${valueText(layer, head)}`;
    return `Layer ${label}, head ${heads[head]}: ${entropy}looks mostly at ${kinds[head]}${shown}`;
  }

  function tell(layer, head) {
    byId("about").textContent = describe(layer, head);
  }

  function eachHead(visit) {
    data.sections[state.section].layers.forEach((layer, index) => layer.heads.forEach((_, head) => visit(index, head)));
  }

  function drawOverview() {
    byId("overview").classList.toggle("numbers", state.statistic !== "maps");
    if (state.statistic === "maps") {
      eachHead(drawThumbnail);
      const { tileEnd } = scaleEnds();
      drawScale("overview-scale", weightTicks(tileEnd), scaleCaption(state.item.sections[state.section].layers[0]));
    } else {
      drawNumbers();
    }
    eachHead((layer, head) => thumbnail(layer, head).setAttribute("aria-label", describe(layer, head)));
  }

  function scaleCaption(layer) {
    const [rows, columns] = layer.size.map((size, side) => size / layer.grid[side]);
    const end = "; colour follows its square root";
    if (isSigned()) {
      const tile = rows === 1 && columns === 1 ? "a weight" : `a tile of ${Math.ceil(rows)} × ${Math.ceil(columns)} tokens`;
      return `change of ${tile}, second − first; colour follows its square root`;
    }
    if (rows === 1 && columns === 1) return "weight of a key in its query’s row" + end;
    const [down, across] = [Math.ceil(rows), Math.ceil(columns)];
    if (data.sections[state.section].pooling === "max") return `largest weight in a tile of ${down} × ${across} tokens` + end;
    return `weight of a tile: of ${across} keys together, averaged over ${down} queries` + end;
  }

  function drawThumbnail(layer, head) {
    const button = thumbnail(layer, head);
    const [canvas, label] = button.children;
    label.textContent = "";
    if (patchesOf()) return drawPictureThumbnail(canvas, layer, head);
    paintHead(canvas, state, layer, head, THUMBNAIL);
  }

  /** Draw a head of an item whose numbers are `bytes`, pooled by its largest weights to at most `most` pixels. */
  function paintHead(canvas, { bytes, item }, layer, head, most) {
    const text = item.sections[state.section];
    const found = text.layers[layer];
    const grid = tiles(bytes, found, head, "");
    const sizes = [text.queries, text.keys].map((number) => item.texts[number].names.length);
    const [top, left] = [grid.row(0), grid.column(0)];
    const [rows, columns] = [grid.row(sizes[0] - 1) - top + 1, grid.column(sizes[1] - 1) - left + 1];
    canvas.height = Math.min(rows, most);
    canvas.width = Math.min(columns, most);
    const largest = new Float64Array(canvas.height * canvas.width);
    const across = Int32Array.from({ length: columns }, (_, column) => Math.floor((column * canvas.width) / columns));
    const { width } = canvas;
    for (let row = 0; row < rows; row++) {
      const line = Math.floor((row * canvas.height) / rows) * width;
      for (let column = 0; column < columns; column++) {
        const place = line + across[column];
        const value = grid.values[(row + top) * grid.columns + column + left];
        if (Math.abs(value) > Math.abs(largest[place])) largest[place] = value;
      }
    }
    const { tileEnd } = scaleEnds(found.signed);
    fill(canvas, (pixels) => largest.forEach((value, at) => (pixels[at] = colorOf(value, tileEnd, found.signed))));
  }

  function fill(canvas, paint) {
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    paint(new Uint32Array(image.data.buffer));
    context.putImageData(image, 0, 0);
  }

  function valueOf(layer, head) {
    return state.item.sections[state.section].layers[layer].numbers[state.statistic][head];
  }

  function valueText(layer, head) {
    const value = valueOf(layer, head);
    return value === null ? "none" : brief(value);
  }

  function drawNumbers() {
    const values = [];
    eachHead((layer, head) => values.push(valueOf(layer, head)));
    const finite = values.filter((value) => value !== null);
    const most = Math.max(...finite.map(Math.abs));
    const [low, high] = isSigned() ? [-most, most] : [Math.min(...finite), Math.max(...finite)];
    eachHead((layer, head) => {
      const [canvas, label] = thumbnail(layer, head).children;
      canvas.width = canvas.height = 1;
      canvas.style.aspectRatio = "";
      const share = high > low ? ((valueOf(layer, head) ?? low) - low) / (high - low) : 0;
      const color = isSigned() ? changes[Math.round(255 * (0.1 + 0.8 * share))] : colors[Math.round(255 * (0.04 + 0.8 * share))];
      fill(canvas, (pixels) => pixels.fill(color));
      label.textContent = valueText(layer, head);
      label.style.color = readableOn(color);
    });
    drawScale("overview-scale", evenTicks(low, high), `${isSigned() ? "change of " : ""}${state.statistic}, one number per head`);
  }

  function walkHeads(event, layer, head) {
    const step = arrow(event);
    if (!step) return;
    event.preventDefault();
    const { layers } = data.sections[state.section];
    const nextLayer = clamp(layer + step.down, layers.length);
    const nextHead = clamp(head + step.right, layers[nextLayer].heads.length);
    choose(nextLayer, nextHead);
    thumbnail(nextLayer, nextHead).focus();
  }

  function markChosen() {
    for (const button of thumbnails.values()) {
      const chosen = button.dataset.place === state.layer + "-" + state.head;
      button.setAttribute("aria-pressed", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
  }
