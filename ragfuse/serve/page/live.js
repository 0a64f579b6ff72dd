// The server's current load: running and waiting requests, tokens per second, times to the first token, reuse.

import { ask } from "./api.js";
import { byId, make, show } from "./dom.js";
import { histogram } from "./figures.js";
import { count, many, share } from "./format.js";

const POLL_MS = 2000;
const MINUTE_MS = 60000;
const looks = []; // the server's counts at each poll of the last minute, while this view was open
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
  const rows = found.ttft.map((n, at) => [bucket(found.ttft_bounds_s, at), n]);
  const used = rows.map(([, n], at) => (n ? at : -1)).filter((at) => at >= 0);
  const shown = used.length ? rows.slice(Math.max(0, used[0] - 1), used[used.length - 1] + 2) : [];
  return make("section", { class: "card stack", "aria-label": "Time to the first token" },
    make("h2", {}, "Time to the first token"),
    shown.length ? histogram(shown) : make("p", { class: "quiet" }, "No question was answered yet."));
}

function promptTokens({ reused = 0, recomputed = 0, fresh = 0 }) {
  return reused + recomputed + fresh;
}

function reuse({ counts }) {
  const { reused = 0, recomputed = 0, fresh = 0 } = counts;
  const all = promptTokens(counts);
  const told = `${share(reused, all)} of ${many(all, "prompt token")} reused since the server began.`;
  return make("section", { class: "card stack", "aria-label": "Reuse" },
    make("h2", {}, "Reuse"), make("p", {}, all ? told : "No question was answered yet."),
    make("ul", { class: "legend" },
      [["r", `reused ${count(reused)}`], ["c", `recomputed ${count(recomputed)}`], ["f", `computed ${count(fresh)}`]]
        .map(([name, text]) => make("li", {}, make("i", { class: `cell ${name}` }), ` ${text}`))));
}

// Tokens per second since the oldest poll of the last minute.
function rate(found, tokens) {
  const now = performance.now();
  while (looks.length && now - looks[0].at > MINUTE_MS) looks.shift();
  const [before] = looks;
  return before ? (1000 * (tokens(found.counts) - tokens(before.counts))) / Math.max(now - before.at, 1) : 0;
}

async function tick(fail) {
  try {
    const found = await ask("/v1/ragfuse/live");
    if (timer === null) return; // the user has left the view meanwhile
    const { counts } = found;
    const written = rate(found, ({ written: n = 0 }) => n);
    const read = rate(found, promptTokens);
    looks.push({ at: performance.now(), counts });
    show(byId("live"),
      make("div", { class: "numbers" },
        number("Running", count(found.running), "requests, of all keys"),
        number("Waiting", count(found.waiting), "requests, of all keys"),
        number("Answer tokens", `${written.toFixed(1)} /s`, "of answers that ended in the last minute"),
        number("Prompt tokens", `${read.toFixed(0)} /s`, "read or reused in the last minute"),
        number("Reused", share(counts.reused || 0, promptTokens(counts)), "of all prompt tokens")),
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
