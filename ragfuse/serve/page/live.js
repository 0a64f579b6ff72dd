// What the server does now: running and waiting requests, tokens a second, times to the first token, reuse by minute.

import { ask } from "./api.js";
import { byId, make, show } from "./dom.js";
import { columns, histogram } from "./figures.js";
import { count, many, share } from "./format.js";

const POLL_MS = 2000;
const SHOWN_MINUTES = 60;
let timer = null;

function number(label, value, note = "") {
  return make("div", { class: "card number" }, make("div", { class: "quiet" }, label), make("div", { class: "big" }, value),
    make("div", { class: "quiet" }, note));
}

function bucket(bounds, at) {
  const name = (s) => (s < 1 ? `${Math.round(1000 * s)} ms` : `${s} s`);
  if (at === bounds.length) return `over ${name(bounds[at - 1])}`;
  return at === 0 ? `up to ${name(bounds[0])}` : `${name(bounds[at - 1])} to ${name(bounds[at])}`;
}

function times(found) {
  const rows = found.hour.ttft.map((n, at) => [bucket(found.ttft_bounds_s, at), n]);
  const used = rows.map(([, n], at) => (n ? at : -1)).filter((at) => at >= 0);
  const shown = used.length ? rows.slice(Math.max(0, used[0] - 1), used[used.length - 1] + 2) : [];
  return make("section", { class: "card stack", "aria-label": "Time to the first token" },
    make("h2", {}, "Time to the first token, last hour"),
    shown.length ? histogram(shown) : make("p", { class: "quiet" }, "No question was answered yet."));
}

function minutesOf(s) {
  return s < 90 ? "minute" : `${Math.round(s / 60)} minutes`;
}

function reuse(found) {
  const { reused, recomputed, fresh, minutes } = found.hour;
  const all = reused + recomputed + fresh;
  const most = Math.max(0, ...minutes.map((each) => each.reused + each.recomputed + each.fresh));
  const empty = Array.from({ length: Math.max(0, SHOWN_MINUTES - minutes.length) }, () => ({ title: "", parts: [] }));
  const bars = minutes.map((each) => ({
    title: `${Math.round(each.ago_s / 60)} minutes ago: ${count(each.reused)} reused, ${count(each.recomputed)} recomputed, ${count(each.fresh)} computed`,
    parts: [["f", each.fresh], ["c", each.recomputed], ["r", each.reused]],
  }));
  const told = `${share(reused, all)} of ${many(all, "prompt token")} reused in the last ${minutesOf(found.hour.seconds)}`;
  return make("section", { class: "card stack", "aria-label": "Reuse" },
    make("h2", {}, "Reuse, last hour"), make("p", {}, all ? `${told}.` : "No question was answered yet."),
    all ? columns(told, [...empty, ...bars], most) : null,
    all ? make("div", { class: "axis quiet", "aria-hidden": "true" }, make("span", {}, "an hour ago"), make("span", {}, "now")) : null,
    make("ul", { class: "legend" },
      [["r", `reused ${count(reused)}`], ["c", `recomputed ${count(recomputed)}`], ["f", `computed ${count(fresh)}`]]
        .map(([name, text]) => make("li", {}, make("i", { class: `cell ${name}` }), ` ${text}`))));
}

async function tick(fail) {
  try {
    const found = await ask("/v1/ragfuse/live");
    if (timer === null) return; // the view was left meanwhile
    const { reused, recomputed, fresh } = found.hour;
    show(byId("live"),
      make("div", { class: "numbers" },
        number("Running", count(found.running), "requests, of all keys"),
        number("Waiting", count(found.waiting), "requests, of all keys"),
        number("Answer tokens", `${found.minute.answer_tokens_per_s.toFixed(1)} /s`, "of answers that ended in the last minute"),
        number("Prompt tokens", `${found.minute.prompt_tokens_per_s.toFixed(0)} /s`, "read or reused in the last minute"),
        number("Reused", share(reused, reused + recomputed + fresh), "of prompt tokens in the last hour")),
      times(found), reuse(found),
      make("p", { class: "quiet" }, "Answers are those of this key; the same counters are at /metrics, for Prometheus."));
  } catch (error) {
    fail(error);
  }
  if (timer !== null) timer = setTimeout(() => tick(fail), POLL_MS);
}

export function startLive(fail) {
  if (timer !== null) return;
  timer = 0;
  tick(fail);
}

export function stopLive() {
  clearTimeout(timer);
  timer = null;
}
