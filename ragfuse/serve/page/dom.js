// Elements without markup: every text becomes a text node, so nothing from a document is ever parsed as HTML.

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && name !== "list" && name !== "form") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

export function show(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

// A table with a header row; each row is a list of texts or elements. `numbers`: indices of right-aligned columns.
export function table(caption, columns, rows, numbers = []) {
  const cell = (tag, content, at, extra = {}) =>
    make(tag, { class: numbers.includes(at) ? "number" : undefined, "data-column": columns[at], ...extra }, content);
  return make("div", { class: "table", tabIndex: 0, role: "region", "aria-label": `Table: ${caption}` },
    make("table", {},
      make("caption", { class: "hidden-text" }, caption),
      make("thead", {}, make("tr", {}, columns.map((name, at) => cell("th", name, at, { scope: "col" })))),
      make("tbody", {}, rows.map((row) => make("tr", {}, row.map((content, at) => cell("td", content, at)))))));
}

export function facts(pairs) {
  return make("dl", { class: "facts" },
    pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined)
      .flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}
