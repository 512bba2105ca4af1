// Lists what overlaps another element or leaves its box: text, controls and pictures, as far as they can be seen.
(exceptions) => {
    const skipped = [...document.querySelectorAll(exceptions)];
    const isSkipped = (element) => skipped.some((each) => each.contains(element));
    const name = (element) => element.tagName.toLowerCase() + (element.id ? "#" + element.id : "")
        + (element.className ? "." + String(element.className).replaceAll(" ", ".") : "")
        + ` "${element.textContent.trim().slice(0, 20)}"`;
    /** The part of an element, or of a line of it, that its scrolling ancestors let through. */
    const visible = (element, box = element.getBoundingClientRect()) => {
        let [left, top, right, bottom] = [box.left, box.top, box.right, box.bottom];
        for (let outer = element.parentElement; outer && outer !== document.body; outer = outer.parentElement) {
            if (getComputedStyle(outer).overflow === "visible") continue;
            const cut = outer.getBoundingClientRect();
            [left, top] = [Math.max(left, cut.left), Math.max(top, cut.top)];
            [right, bottom] = [Math.min(right, cut.right), Math.min(bottom, cut.bottom)];
        }
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
