// The view to try ragfuse in: passages for a question, the conversation, one question at a time.

import { ask } from "./api.js";
import { chosenDocuments, startDocuments } from "./documents.js";
import { byId } from "./dom.js";
import { Turn } from "./turn.js";

let model = "";
let turns = [];
let running = null; // the AbortController of the question that is being answered

async function passagesFor(question) {
  const documents = chosenDocuments();
  if (!documents.length) return [];
  const body = { query: question, top_k: Number(byId("passages").value), documents: documents.map((each) => each.id) };
  return (await ask("/v1/ragfuse/documents/search", { body })).data;
}

function messageOf(question, passages) {
  const parts = passages.flatMap((each) => [
    { type: "text-plain", text: each.text, title: each.source },
    { type: "text", text: "\n\n" }]);
  return { role: "user", content: [...parts, { type: "text", text: question }] };
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = Boolean(controller);
  byId("stop").hidden = !controller;
  byId("anew").disabled = Boolean(controller) || !turns.length;
  for (const each of turns) each.disabled = Boolean(controller);
}

// Answer a turn. Errors are shown in the turn.
async function answer(turn) {
  const controller = new AbortController();
  setRunning(controller);
  try {
    turn.answer = await turn.ask(controller.signal);
  } catch (error) {
    turn.stop(error);
  } finally {
    setRunning(null);
  }
}

function history() {
  return turns.filter((each) => each.answer !== undefined)
    .flatMap((each) => [each.messages[each.messages.length - 1], { role: "assistant", content: each.answer }]);
}

// The passages that the conversation does not contain yet.
function newOf(passages, messages) {
  const parts = messages.filter((each) => each.role === "user").flatMap((each) => each.content);
  const known = new Set(parts.filter((each) => each.type === "text-plain").map((each) => each.text));
  return passages.filter((each) => !known.has(each.text));
}

async function askQuestion(fail) {
  const question = byId("question").value.trim();
  if (!question || running) return;
  setRunning(new AbortController());
  let passages;
  try {
    passages = await passagesFor(question);
  } catch (error) {
    setRunning(null);
    fail(error);
    return;
  }
  const options = { length: Number(byId("length").value), compare: byId("compare").checked };
  const before = history();
  const turn = new Turn(model, question, [...before, messageOf(question, newOf(passages, before))], options);
  turn.onAgain = () => running || answer(turn);
  turns.push(turn);
  byId("empty").hidden = true;
  byId("question").value = "";
  byId("turns").prepend(turn.element);
  await answer(turn);
}

function tell(id, word) {
  const show = () => { byId(`${id}-told`).textContent = `${byId(id).value}${word}`; };
  byId(id).addEventListener("input", show);
  show();
}

export async function startTry(card, fail) {
  model = card.name;
  if (card.refusal) byId("ask-note").textContent = `This model's KV is not reused: ${card.refusal}`;
  tell("passages", "");
  tell("length", " tokens");
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    askQuestion(fail);
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("ask").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("anew").addEventListener("click", () => {
    turns = [];
    byId("turns").replaceChildren();
    byId("empty").hidden = false;
    byId("anew").disabled = true;
    byId("question").focus();
  });
  await startDocuments();
}
