// Making nodes, which never reads text as markup; numbers in words; the chart of estimates.
"use strict";

function node(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "rect", "line", "text", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const soft = (...children) => node("p", { class: "soft" }, ...children);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const seconds = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`);
const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Share accepted by estimate: a bar for each bin that holds tokens, a line at their mean estimate. */
function estimatesChart(bins) {
  const [height, width, left, top] = [120, 44, 48, 8];
  const right = left + bins.length * width;
  const at = (share) => top + height * (1 - share);
  const percent = (share) => `${(100 * share).toFixed(0)} %`;
  const words = (text, x, y, anchor = "middle") => node("text", { x, y, "text-anchor": anchor }, text);
  const filled = bins.map((bin, i) => [bin, left + i * width]).filter(([bin]) => bin.n);
  const said = filled.map(([bin]) => `${bin.low} to ${bin.high}: ${percent(bin.accepted)} of ${bin.n}`);
  const bars = filled.flatMap(([bin, x], i) => [
    node(
      "rect",
      { x: x + 3, y: at(bin.accepted) - 1, width: width - 6, height: height * bin.accepted + 1 },
      node("title", {}, `estimates from ${said[i]} accepted`),
    ),
    node("line", { class: "mean", x1: x, x2: x + width, y1: at(bin.mean), y2: at(bin.mean) }),
    words(`n ${bin.n}`, x + width / 2, at(0) + 28),
  ]);
  const marks = [0, 0.5, 1].map((share) => words(percent(share), left - 6, at(share) + 4, "end"));
  const edges = [...bins.map((bin) => bin.low), 1].map((edge, i) => words(edge.toFixed(1), left + i * width, at(0) + 14));
  const axis = node("line", { class: "axis", x1: left, x2: right, y1: at(0), y2: at(0) });
  const label = `share accepted by estimate: ${said.join("; ")}`;
  const view = { class: "bins", viewBox: `0 0 ${right + 12} ${height + 40}`, role: "img", "aria-label": label };
  return node("svg", view, axis, ...bars, ...marks, ...edges);
}
