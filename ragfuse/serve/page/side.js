// One of the two answers shown side by side: a clock until the first token, then the streamed text.

import { stream } from "./api.js";
import { make } from "./dom.js";
import { count, seconds } from "./format.js";

export class Side {
  constructor(name, note) {
    this.clock = make("output", { class: "clock", "aria-label": `Time to the first token, ${name}` }, "–");
    this.text = make("p", { class: "answer" });
    this.told = make("p", { class: "quiet" }, note);
    this.element = make("section", { class: "card side", "aria-label": name },
      make("div", { class: "row" }, make("h3", { class: "grow" }, name), this.clock), this.text, this.told);
    this.reset(note);
  }

  reset(note) {
    this.clock.textContent = "–";
    this.clock.classList.remove("running");
    this.text.replaceChildren();
    this.told.className = "quiet";
    this.told.textContent = note;
    this.answer = "";
    this.trace = null;
    this.first = null;
  }

  // Ask, and return the trace. The clock runs until the first piece of the answer.
  async ask(body, signal) {
    this.reset("waits for the first token");
    const began = performance.now();
    const ticking = setInterval(() => {
      this.clock.textContent = seconds((performance.now() - began) / 1000);
    }, 50);
    this.clock.classList.add("running");
    const stop = () => {
      clearInterval(ticking);
      this.clock.classList.remove("running");
    };
    try {
      await stream("/v1/chat/completions", { ...body, stream: true }, (event) => {
        const choice = event.choices[0];
        const piece = choice?.delta.content || choice?.delta.reasoning_content || "";
        if (piece && this.first === null) {
          stop();
          this.first = (performance.now() - began) / 1000;
          this.clock.textContent = seconds(this.first);
          this.told.textContent = "writes";
        }
        if (piece) {
          this.text.append(piece);
          this.answer += choice.delta.content || "";
        }
        if (event.ragfuse) this.trace = event.ragfuse;
      }, signal);
      if (this.first === null) {
        this.first = (performance.now() - began) / 1000;
        this.clock.textContent = seconds(this.first);
        this.text.append(make("em", {}, "an empty answer"));
      }
      this.told.textContent = summary(this.trace);
      return this.trace;
    } catch (error) {
      this.fail(error);
      throw error;
    } finally {
      stop();
    }
  }

  fail(error) {
    this.told.className = error.name === "AbortError" ? "quiet" : "error";
    this.told.textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
}

function summary(trace) {
  if (!trace) return "";
  const computed = trace.tokens_recomputed + trace.tokens_fresh;
  return `first token ${seconds(trace.ttft_s)} on the server, ${count(computed)} of ${count(trace.tokens)} prompt tokens computed`;
}
