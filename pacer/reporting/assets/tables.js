// Tables sort by the column whose header is pressed: numbers by value, words by the alphabet, what is missing last.
"use strict";
(() => {
  const key = (row, column) => {
    const text = row.cells[column].textContent.trim();
    const number = parseFloat(text.replace(/,/g, ""));
    return { text, number, missing: text === "–" || text === "" };
  };

  const compare = (a, b, sign) => {
    if (a.missing || b.missing) return a.missing - b.missing;
    const numeric = !Number.isNaN(a.number) && !Number.isNaN(b.number);
    return sign * (numeric ? a.number - b.number : a.text.localeCompare(b.text, "en", { numeric: true }));
  };

  const sort = (header) => {
    const table = header.closest("table");
    const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [key(row, header.cellIndex), row]);
    rows.sort(([a], [b]) => compare(a, b, sign));
    body.append(...rows.map(([, row]) => row));
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("th button");
    if (button) sort(button.closest("th"));
  });
})();
