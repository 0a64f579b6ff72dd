// One question of a conversation: both answers, the prompt as a strip, the plan, and asking again in other ways.

import { ask } from "./api.js";
import { byId, make, show } from "./dom.js";
import { count, many, share } from "./format.js";
import { same } from "./same.js";
import { Side } from "./side.js";
import { strip } from "./strip.js";

const POLICIES = [
  ["", "auto: safe for this model"],
  ["query", "query: the question's attention"],
  ["lexical", "lexical: the question's words"],
  ["hkvd", "hkvd: where KV differs most"],
  ["lego", "lego: the start of each chunk"],
];
const WAITS = "waits for ragfuse, so that neither slows the other";
const COUNTED = "A passage within a shared prefix counts as prefix, not as a passage.";
let number = 0;

export class Turn {
  // messages: the conversation up to this question, in OpenAI's form.
  constructor(model, question, messages, options) {
    number += 1;
    this.model = model;
    this.messages = messages;
    this.options = options;
    this.policy = "";
    this.ratio = null;
    this.sides = { ragfuse: new Side("ragfuse", "waits"), full: new Side("Full prefill", WAITS) };
    this.sides.full.element.hidden = !options.compare;
    this.below = make("div", { class: "stack" });
    this.element = make("article", { class: "turn stack", "aria-label": `Question: ${question.slice(0, 80)}` },
      make("p", { class: "question" }, question),
      make("div", { class: "sides" }, this.sides.ragfuse.element, this.sides.full.element),
      this.below);
    this.controls = this.makeControls(number);
  }

  body() {
    const ragfuse = { token_trace: true };
    if (this.policy) ragfuse.policy = this.policy;
    if (this.ratio !== null) ragfuse.ratio = this.ratio;
    return { model: this.model, messages: this.messages, max_tokens: this.options.length, ragfuse };
  }

  // Ask with reuse, then by full prefill if that answer is wanted and missing. Return the answer with reuse.
  async ask(signal) {
    const body = this.body();
    this.below.replaceChildren();
    const plan = await ask("/v1/ragfuse/explain", { body, signal });
    const trace = await this.sides.ragfuse.ask(body, signal);
    this.showBelow(plan, trace, body);
    if (this.options.compare && !this.sides.full.trace) {
      await this.sides.full.ask({ ...body, ragfuse: { reuse: false } }, signal);
    }
    this.showVerdict(trace);
    return this.sides.ragfuse.answer;
  }

  stop(error) {
    for (const side of Object.values(this.sides)) if (!side.trace) side.fail(error);
  }

  showBelow(plan, trace, body) {
    this.verdict = make("p", { class: "verdict", title: COUNTED }, reused(trace));
    const words = make("details", {}, make("summary", {}, "The plan in words"), make("pre", { class: "code", tabIndex: 0 }, plan.words));
    this.lengths = make("p", { class: "quiet lengths", hidden: true });
    show(this.below, this.verdict, this.lengths, strip(trace), this.controls, words, same(body));
  }

  showVerdict(trace) {
    const { ragfuse, full } = this.sides;
    const parts = [reused(trace)];
    if (full.trace) {
      const times = full.first / ragfuse.first;
      parts.unshift(times >= 1.05 ? `First token ${times.toFixed(1)}x faster.`
        : times > 0.95 ? "First token at about the same time." : `First token ${(1 / times).toFixed(1)}x slower.`);
      parts.push(full.answer.trim() === ragfuse.answer.trim() ? "Both answers are the same." : "The answers differ.");
      this.lengths.textContent = lengths(trace.tokens, full.trace.tokens);
      this.lengths.hidden = !this.lengths.textContent;
    }
    this.verdict.textContent = parts.join(" ");
    byId("spoken").textContent = `Answered. ${parts.join(" ")}`;
  }

  makeControls(id) {
    const told = make("output", { for: `ratio-${id}` }, "as the policy chooses");
    const policy = make("select", { id: `policy-${id}` }, POLICIES.map(([value, name]) => make("option", { value }, name)));
    const ratio = make("input", { type: "range", id: `ratio-${id}`, min: 0, max: 1, step: 0.05, value: 0.15 });
    const auto = make("button", { type: "button", class: "small" }, "Let the policy choose");
    auto.disabled = true;
    const again = () => this.onAgain?.();
    const tell = () => {
      this.ratio = Number(ratio.value);
      auto.disabled = false;
      const word = this.ratio === 0 ? ", plain reuse" : this.ratio === 1 ? ", all of it" : "";
      told.textContent = `${Math.round(100 * this.ratio)}% of chunk tokens${word}`;
    };
    ratio.addEventListener("input", tell);
    ratio.addEventListener("change", again);
    policy.addEventListener("change", () => {
      this.policy = policy.value;
      again();
    });
    auto.addEventListener("click", () => {
      this.ratio = null;
      auto.disabled = true;
      told.textContent = "as the policy chooses";
      again();
    });
    return make("fieldset", { class: "again" }, make("legend", { class: "label" }, "Ask again with"),
      make("div", {}, make("label", { for: `policy-${id}` }, "Policy"), policy),
      make("div", {}, make("label", { for: `ratio-${id}` }, "Recomputed "), told, ratio), auto);
  }

  set disabled(is) {
    this.controls.disabled = is;
  }
}

// Return why the two prompts have different numbers of tokens; "" if the numbers are equal.
function lengths(own, full) {
  if (own === full) return "";
  const difference = many(Math.abs(own - full), "token");
  return `The prompt has ${difference} ${own > full ? "more" : "fewer"} with reuse: reused passages are tokenized separately.`;
}

function reused(trace) {
  if (!trace.tokens_reused) return `Nothing was reused: ${trace.fallback_reason || "none of the prompt is stored"}.`;
  const chunks = trace.segments.filter((each) => each.kind === "chunk" && !each.goes_on);
  const hits = chunks.filter((each) => each.hit).length;
  const parts = trace.tokens_prefix ? [`${count(trace.tokens_prefix)} as a shared prefix`] : [];
  if (chunks.length) parts.push(`${hits} of ${parts.length ? "the other " : ""}${many(chunks.length, "passage")}`);
  const found = parts.length ? ` (${parts.join(", ")})` : "";
  return `${share(trace.tokens_reused, trace.tokens)} of ${count(trace.tokens)} prompt tokens reused${found}, ${count(trace.tokens_recomputed)} recomputed${trace.tokens_recomputed ? ` by ${trace.policy}` : ""}.`;
}
