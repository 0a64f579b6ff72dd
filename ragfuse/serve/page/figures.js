// Small figures without a library: a filled bar and a histogram. Every figure also shows the numbers as text.

import { make } from "./dom.js";

export function meter(value, most, text) {
  const bar = make("span", { class: "fill" });
  bar.style.width = `${most ? Math.min(100, (100 * value) / most) : 0}%`;
  return make("div", { class: "meter" }, make("span", { class: "track", "aria-hidden": "true" }, bar), make("span", { class: "told" }, text));
}

// Return a histogram: a horizontal bar for each [label, count] in `rows`.
export function histogram(rows) {
  const most = Math.max(1, ...rows.map(([, n]) => n));
  return make("ul", { class: "histogram" }, rows.map(([label, n]) => {
    const bar = make("span", { class: "fill" });
    bar.style.width = `${(100 * n) / most}%`;
    return make("li", {}, make("span", { class: "label" }, label), make("span", { class: "track", "aria-hidden": "true" }, bar), make("span", { class: "n" }, String(n)));
  }));
}
