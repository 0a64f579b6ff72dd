// The prompt as a strip: a cell per token, coloured by the token's fate, in segments that show details when clicked.

import { facts, make, show } from "./dom.js";
import { bytes, count, many } from "./format.js";

const FATES = {
  r: ["reused", "KV of a chunk, taken from the store"],
  c: ["recomputed", "chosen by the policy and computed again"],
  f: ["computed", "new text, or not stored yet"],
  p: ["prefix", "shared prefix or earlier turns, reused exactly"],
};
const ENCODED = { alone: "alone", prefix: "after the prompt's prefix", filler: "after filler text" };
const KINDS = { chunk: "chunk", prefix: "prefix", module: "module", history: "earlier turns", fresh: "new text" };

export function strip(trace) {
  const told = trace.token_trace;
  const detail = make("div", { class: "detail", hidden: true });
  const segments = segmentsOf(told, trace).map(([each, found]) => segment(told, each, found, detail));
  const shown = told.texts.length < told.tokens ? `, of which the first ${count(told.texts.length)} are shown` : "";
  return make("div", { class: "stack strip-box" },
    make("div", { class: "row" },
      make("h3", { class: "grow" }, `The prompt, ${many(told.tokens, "token")}${shown}`), legend(told)),
    make("div", { class: "strip", role: "group", "aria-label": "Segments of the prompt; choose one to see more" }, segments),
    make("p", { class: "quiet" }, "Each cell is a token. Choose a part to see where it came from."),
    detail);
}

// The parts of the prompt, in order: the trace's segments, and the fresh tokens between them.
function segmentsOf(told, trace) {
  const found = [];
  let at = 0;
  const end = told.fates.length;
  const push = (to, kind, segment) => {
    if (at < Math.min(to, end)) found.push([{ from: at, to: Math.min(to, end), kind }, segment]);
    at = Math.max(at, to);
  };
  for (const each of [...trace.segments].sort((one, other) => one.start - other.start)) {
    push(each.start, "fresh", null);
    push(each.start + each.n_tokens, each.kind, each);
  }
  push(end, "fresh", null);
  return found;
}

function legend(told) {
  return make("ul", { class: "legend" }, Object.entries(FATES).map(([letter, [name, what]]) =>
    make("li", { title: what }, make("i", { class: `cell ${letter}` }), ` ${name} ${count(told.fates.split(letter).length - 1)}`)));
}

function nameOf(each, found) {
  return found?.source || KINDS[each.kind] || each.kind;
}

function segment(told, each, found, detail) {
  const fates = told.fates.slice(each.from, each.to);
  const parts = Object.entries(FATES).map(([letter, [name]]) => [fates.split(letter).length - 1, name]).filter(([n]) => n);
  const label = `${nameOf(each, found)}, ${many(each.to - each.from, "token")}: ${parts.map(([n, name]) => `${n} ${name}`).join(", ")}`;
  const element = make("span", { class: `segment ${each.kind}`, role: "button", tabIndex: 0, "aria-label": label, title: label, "aria-expanded": "false" },
    [...fates].map((letter) => make("i", { class: `cell ${letter}` })));
  const choose = () => {
    const wasOpen = element.getAttribute("aria-expanded") === "true";
    for (const other of element.parentElement.children) other.setAttribute("aria-expanded", "false");
    element.setAttribute("aria-expanded", String(!wasOpen));
    detail.hidden = wasOpen;
    show(detail, make("h3", {}, nameOf(each, found)), told_of(each, found), words(told, each));
  };
  element.addEventListener("click", choose);
  element.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose();
    }
  });
  return element;
}

function told_of(each, found) {
  if (!found) {
    const why = each.kind === "fresh" ? "Text outside all chunks: it is computed." : "No details are known.";
    return facts([["tokens", count(each.to - each.from)], ["", why]]);
  }
  return facts([
    ["kind", KINDS[found.kind] || found.kind],
    ["source", found.source],
    ["tokens", `${count(found.n_tokens)}, of which ${count(found.recomputed)} recomputed`],
    ["found", found.hit ? "yes" : `no: ${found.why || "not in the store"}`],
    ["tier", found.tier],
    ["level", found.hit ? found.level + (found.nbytes ? `, ${bytes(found.nbytes)}` : "") : ""],
    ["encoded", ENCODED[found.encoded]],
    ["exact", found.hit ? (found.exact ? "yes: the same KV as full prefill computes" : "no: an approximation; the tokens that differ most are recomputed") : ""],
  ]);
}

// The tokens as text, coloured by the tokens' fates, with all white space.
function words(told, each) {
  const runs = [];
  for (let at = each.from; at < each.to; at += 1) {
    const last = runs[runs.length - 1];
    if (last && last.fate === told.fates[at]) last.text += told.texts[at];
    else runs.push({ fate: told.fates[at], text: told.texts[at] });
  }
  return make("p", { class: "words" }, runs.map((run) => make("span", { class: run.fate, title: FATES[run.fate][0] }, run.text)));
}
