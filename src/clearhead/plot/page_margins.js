  // ---- marginals: what rows and columns come to ---------------------------------------------------------------

  function drawMargins([width, height], ratio) {
    const { view, current } = state;
    const most = [current.entropy, current.received].map((values) => values.reduce((a, b) => Math.max(a, b), 0));
    drawBars(byId("entropy"), [BAR, height], ratio, current.entropy, view.row, view.rows, most[0], true);
    drawBars(byId("received"), [width, BAR], ratio, current.received, view.column, view.columns, most[1], false);
    byId("entropy-title").replaceChildren("entropy", element("br"), `0 – ${brief(most[0])} nats`);
    byId("received-title").replaceChildren("received", element("br"), `0 – ${brief(most[1])}`);
  }

  function drawBars(canvas, size, ratio, values, first, count, most, upright) {
    [canvas.style.width, canvas.style.height] = size.map((pixels) => pixels + "px");
    [canvas.width, canvas.height] = size.map((pixels) => Math.round(pixels * ratio));
    const context = canvas.getContext("2d");
    const [along, across] = upright ? [canvas.height, canvas.width] : [canvas.width, canvas.height];
    const step = along / count;
    const gap = step > 6 ? Math.round(ratio) : 0;
    context.fillStyle = getComputedStyle(document.body).getPropertyValue("--bar");
    for (let place = 0; place < count; place++) {
      const length = most ? Math.max(1, (values[first + place] / most) * (across - 2)) : 1;
      const at = place * step;
      const thick = Math.max(1, step - gap);
      if (upright) context.fillRect(0, at, length, thick);
      else context.fillRect(at, 0, thick, length);
    }
  }
