// Lists what overlaps another element or leaves its box: text, controls and pictures, as far as they can be seen.
(exceptions) => {
    const isSkipped = (element) => element.closest(exceptions) !== null;
    const name = (element) => element.tagName.toLowerCase() + (element.id ? "#" + element.id : "")
        + (element.className ? "." + String(element.className).replaceAll(" ", ".") : "")
        + ` "${element.textContent.trim().slice(0, 20)}"`;
    const clips = new Map();
    /** What an element and its ancestors let through: thousands of elements share a few of these. */
    const clipOf = (outer) => {
        if (!outer || outer === document.body) return [-Infinity, -Infinity, Infinity, Infinity];
        if (!clips.has(outer)) {
            const clip = clipOf(outer.parentElement);
            const isOpen = getComputedStyle(outer).overflow === "visible";
            clips.set(outer, isOpen ? clip : meet(outer.getBoundingClientRect(), clip));
        }
        return clips.get(outer);
    };
    const meet = (box, [left, top, right, bottom]) =>
        [Math.max(left, box.left), Math.max(top, box.top), Math.min(right, box.right), Math.min(bottom, box.bottom)];
    /** The part of an element, or of a line of it, that its scrolling ancestors let through. */
    const visible = (element, box = element.getBoundingClientRect()) => {
        const [left, top, right, bottom] = meet(box, clipOf(element.parentElement));
        return { left, top, right, bottom, element };
    };
    const linesOf = (element) => getComputedStyle(element).display === "inline" ? [...element.getClientRects()] : [element.getBoundingClientRect()];
    const isLeaf = (element) => ["BUTTON", "SELECT", "CANVAS", "INPUT", "svg"].includes(element.tagName)
        || [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const all = [...document.body.querySelectorAll("*")].filter((element) =>
        !["SCRIPT", "NOSCRIPT", "OPTION", "STYLE"].includes(element.tagName) && element.checkVisibility({ visibilityProperty: true }));
    const leaves = all.filter((element) => isLeaf(element) && !isSkipped(element))
        .flatMap((element) => linesOf(element).map((line) => visible(element, line)))
        .filter(({ left, top, right, bottom }) => right - left > 1 && bottom - top > 1)
        .sort((a, b) => a.top - b.top);
    const problems = [];
    let active = [];
    for (const box of leaves) {
        active = active.filter((other) => other.bottom > box.top + 1.5);
        for (const other of active) {
            const apart = Math.min(box.right, other.right) - Math.max(box.left, other.left) <= 1.5
                || Math.min(box.bottom, other.bottom) - box.top <= 1.5;
            const nested = box.element.contains(other.element) || other.element.contains(box.element);
            if (!apart && !nested) problems.push(`${name(box.element)} overlaps ${name(other.element)}`);
        }
        active.push(box);
        if (box.left < -1 || box.right > document.documentElement.clientWidth + 1) problems.push(`${name(box.element)} leaves the page`);
    }
    for (const element of all) {
        const style = getComputedStyle(element);
        if (style.overflowX !== "visible" || style.display === "inline" || isSkipped(element)) continue;
        if (element.clientWidth && element.scrollWidth > element.clientWidth + 2) {
            const inside = [...element.querySelectorAll("*")].filter((each) => !isSkipped(each) && visible(each).right > element.getBoundingClientRect().right + 2);
            if (inside.length) problems.push(`${name(inside[0])} leaves ${name(element)}`);
        }
    }
    return [...new Set(problems)].slice(0, 12);
}
