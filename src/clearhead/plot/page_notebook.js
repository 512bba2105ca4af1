  // ---- in the frame of a notebook; notebook.js lies outside of it ------------------------------------------------

  function listenToNotebook() {
    if (parent === window) return;
    addEventListener("message", ({ source, data: said }) => {
      if (source !== parent || !["light", "dark"].includes(said?.theme) || said.theme === offeredTheme) return;
      offeredTheme = said.theme;
      takeTheme();
    });
    const { body } = document;
    new ResizeObserver(() => parent.postMessage({ height: Math.ceil(body.getBoundingClientRect().height) }, "*")).observe(body);
  }
