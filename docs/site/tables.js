// Tables that are wider than the page scroll in their own box (extra.css). The box takes the keyboard while it scrolls.
const fit = (boxes) => {
  for (const box of boxes) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
};

window.addEventListener("load", () => {
  const sizes = new ResizeObserver((entries) => fit(entries.map((entry) => entry.target)));
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) sizes.observe(box);
});
