// The table of models: what is typed hides the rows that do not have it, and says how many are left.
for (const box of document.querySelectorAll(".models")) {
  const rows = [...box.querySelectorAll("tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const input = box.querySelector("input");
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/);
    let left = 0;
    for (const [place, row] of rows.entries()) {
      row.hidden = !words.every((word) => texts[place].includes(word));
      left += !row.hidden;
    }
    box.querySelector("output").textContent = `${left} of ${rows.length}`;
  };
  input.addEventListener("input", show);
  show();
}
