// ---- the theme, and the frame of a notebook that offers one; notebook.js lies outside of the frame ------------------

import { byId, element, option, say } from "./page_data.js";

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
export const printed = matchMedia("print");
let offeredTheme = "";

/** Paper is light; on a screen the chosen theme holds, or else the browser's. */
export function isDark() {
  const { theme } = document.documentElement.dataset;
  return !printed.matches && (theme ? theme === "dark" : prefersDark.matches);
}

/** The control of the theme. The chosen theme holds, or else the notebook's; without either, the browser's. */
export function listenToTheme(draw) {
  const [label, menu] = [element("label", say`Theme` + " "), element("select")];
  menu.id = "theme";
  menu.append(option("", say`automatic`), option("light", say`light`), option("dark", say`dark`));
  label.append(menu);
  byId("controls").append(label);
  const takeTheme = () => {
    document.documentElement.dataset.theme = menu.value || offeredTheme;
    draw();
  };
  menu.addEventListener("change", takeTheme);
  for (const media of [prefersDark, printed]) media.addEventListener("change", draw);
  if (parent !== window) listenToNotebook(takeTheme);
}

function listenToNotebook(takeTheme) {
  addEventListener("message", ({ source, data: said }) => {
    if (source !== parent || !["light", "dark"].includes(said?.theme) || said.theme === offeredTheme) return;
    offeredTheme = said.theme;
    takeTheme();
  });
  const { body } = document;
  new ResizeObserver(() => parent.postMessage({ height: Math.ceil(body.getBoundingClientRect().height) }, "*")).observe(body);
}
