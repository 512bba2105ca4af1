// ---- what one head does: its numbers, and the texts in which it was strongest ---------------------------------------

import { nameOfHead, meaningOf, valueOf } from "./census_heads.js";
import { drawMap } from "./census_map.js";
import { brief, colorOf, css, readableOn } from "./page_color.js";
import { byId, data, element, say } from "./page_data.js";

/** Show a head with its rows. */
export function showHead(at, rows) {
  const head = data.heads[at];
  const name = nameOfHead(head);
  byId("head-title").textContent = name[0].toUpperCase() + name.slice(1);
  byId("head-kinds").replaceChildren(...namesOf(head));
  byId("head-module").textContent = head.module;
  byId("numbers").replaceChildren(...data.metrics.map((metric) => drawNumber(head, metric)));
  byId("strongest").replaceChildren(
    ...(rows.length ? rows.map((row) => drawRow(row, name)) : [element("p", say`No text is kept for this head.`, "quiet")]),
  );
  byId("shading").hidden = !rows.some(({ context }) => context.length);
  const link = byId("other-page");
  link.hidden = !data.link;
  if (data.link) link.href = `${data.link}#layer=${head.layer}&head=${head.head}`;
}

/** What the kinds of a head mean, each in a line. */
function namesOf(head) {
  if (!head.kinds.length) return [element("li", say`No mean weight is large enough for a name.`)];
  return head.kinds.map((kind) => {
    const line = element("li");
    line.append(element("b", kind), say` ${brief(valueOf(head, kind))}: ${meaningOf(kind)}`);
    return line;
  });
}

function drawNumber(head, { name, meaning }) {
  const value = valueOf(head, name);
  const line = element("tr");
  const title = element("th", name);
  title.scope = "row";
  title.title = meaning;
  const rank = 1 + data.heads.filter((other) => valueOf(other, name) > value).length;
  line.append(title, element("td", value === null ? "–" : value.toFixed(3)));
  line.append(element("td", value === null ? "" : say`${rank} of ${data.heads.length}`));
  return line;
}

function drawRow(row, name) {
  const box = element("div", "", "strong");
  box.append(element("p", say`${row.metric} ${brief(row.value)}, text ${row.text}, token ${row.position}`, "quiet"));
  const line = element("p", "", "context");
  for (const part of row.context) line.append(part ? drawToken(part, row.position) : "…", " ");
  const keys = element("ol", "", "quiet");
  for (const [token, position, weight] of row.keys) keys.append(element("li", `${token} (${position}) ${brief(weight)}`));
  if (row.context.length) box.append(line, keys);
  if (row.map) {
    const title = say`Weights of ${name} in text ${row.text}: queries down, keys across`;
    box.append(element("p", title, "quiet"), drawMap(row.map, row.position, title, byId("strongest").clientWidth));
  }
  return box;
}

function drawToken([token, position, weight], query) {
  const mark = element("span", token, position === query ? "query" : "");
  const color = colorOf(weight, 1);
  mark.style.background = css(color);
  mark.style.color = readableOn(color);
  mark.title = brief(weight);
  return mark;
}
