// The view of the store: tiers, sources, conversations and schemas of this API key, with buttons that delete stored data.

import { ask } from "./api.js";
import { byId, make, show, table } from "./dom.js";
import { refresh as refreshDocuments } from "./documents.js";
import { ago, bytes, capacity, count, many, share } from "./format.js";
import { meter } from "./figures.js";

const SHOWN = 50;

function sure(text, yes) {
  byId("sure-text").textContent = text;
  byId("sure-yes").textContent = yes;
  const dialog = byId("sure-dialog");
  dialog.returnValue = "no";
  dialog.showModal();
  byId("sure-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

function action(name, label, work, { danger, question } = {}) {
  return make("button", { class: danger ? "small danger" : "small", "aria-label": label, onclick: async () => {
    if (question && !(await sure(question, name))) return;
    try {
      byId("failure").textContent = "";
      const done = await work();
      await showStore(done?.object === "ragfuse.deleted" ? freed(done) : "");
      await refreshDocuments();
    } catch (error) {
      byId("failure").textContent = error.message;
    }
  } }, name);
}

// Describe what a deletion freed and what it kept.
function freed({ nbytes, kept }) {
  const stays = kept ? `, ${many(kept, "passage")} kept, as another source has ${kept === 1 ? "it" : "them"}` : "";
  return `${bytes(nbytes)} freed${stays}.`;
}

function remove(query) {
  return () => ask(`/v1/ragfuse/entries?${new URLSearchParams(query)}`, { method: "DELETE" });
}

function tiers(store, live) {
  const { missed = 0 } = live.counts;
  const of = (tier) => live.counts[`hit ${tier}`] || 0;
  const hits = store.tiers.reduce((sum, each) => sum + of(each.name), 0);
  const rows = store.tiers.map((each) => [
    each.name, meter(each.nbytes, each.capacity, `${bytes(each.nbytes)} of ${capacity(each.capacity)}`),
    count(each.entries), count(each.n_tokens), count(each.pinned), share(of(each.name), hits + missed)]);
  const limit = store.limits.bytes ? `, of at most ${capacity(store.limits.bytes)} in a tier` : "";
  return make("section", { class: "card stack", "aria-label": "Tiers" }, make("h2", {}, "Tiers"),
    table("Tiers", ["tier", "filled by you", "entries", "tokens", "pinned", "hit rate"], rows, [2, 3, 4, 5]),
    make("p", { class: "quiet" }, `Hit rate: of ${many(hits + missed, "lookup")} since the server started, the share found in this tier; `
      + `${count(missed)} were found in none. You keep ${many(store.texts, "known text")} and ${many(store.sessions, "conversation")}${limit}.`));
}

function sources(found) {
  const most = Math.max(1, ...found.sources.map((each) => each.nbytes));
  const rows = found.sources.map((each) => [
    each.source || "not from a document",
    meter(each.nbytes, most, bytes(each.nbytes)),
    Object.entries(each.tiers).map(([tier, n]) => `${tier} ${bytes(n)}`).join(", "), count(each.chunks), count(each.hits),
    make("div", { class: "row" }, each.source ? [
      action("Delete", `Delete ${each.source}`, remove({ source: each.source }),
        { danger: true, question: `Delete the KV of ${each.source} from every tier? KV that other sources share is kept.` })] : [])]);
  return make("section", { class: "card stack", "aria-label": "Bytes by source" },
    make("div", { class: "row" }, make("h2", { class: "grow" }, "Bytes by source"),
      action("Delete all", "Delete all entries", remove({ all: "true" }),
        { danger: true, question: "Delete all of your KV from every tier? Documents have to be encoded again." })),
    rows.length ? table("Bytes by source", ["source", "KV", "copies by tier", "chunks", "hits", ""], rows, [3, 4])
      : make("p", { class: "quiet" }, "Nothing is stored yet."),
    rows.length ? make("p", { class: "quiet" }, "KV is counted once, whatever the number of tiers with a copy; a chunk of several sources is counted in each.") : null);
}

function sessions(found) {
  const rows = found.data.slice(0, SHOWN).map((each) => [
    each.id, count(each.turns), count(each.tokens), ago(each.used), each.persistent ? "yes" : "in memory only",
    action("Delete", `Delete conversation ${each.id}`,
      () => ask(`/v1/ragfuse/sessions/${encodeURIComponent(each.id)}`, { method: "DELETE" }),
      { danger: true, question: `Delete the conversation ${each.id} and its KV?` })]);
  return make("section", { class: "card stack", "aria-label": "Conversations" }, make("h2", {}, "Conversations"),
    rows.length ? table("Conversations", ["session", "turns", "tokens", "used", "saved", ""], rows, [1, 2])
      : make("p", { class: "quiet" }, "None is stored. Requests with session_id, and /v1/responses, store theirs."));
}

function schemas(found) {
  const rows = found.data.map((each) => [each.name, ago(each.added),
    action("Delete", `Delete schema ${each.name}`,
      () => ask(`/v1/ragfuse/schemas/${encodeURIComponent(each.name)}`, { method: "DELETE" }),
      { danger: true, question: `Delete the schema ${each.name}, and the KV of its modules?` })]);
  return make("section", { class: "card stack", "aria-label": "Schemas" }, make("h2", {}, "Schemas"),
    rows.length ? table("Schemas", ["schema", "added", ""], rows)
      : make("p", { class: "quiet" }, "None is registered. POST /v1/ragfuse/schemas registers one."));
}

// Show the view. The message `told` describes what was just deleted, and disappears when the view is shown again.
export async function showStore(told = "") {
  const [store, live, talks, forms] = await Promise.all([
    ask("/v1/ragfuse/store"), ask("/v1/ragfuse/live"),
    ask("/v1/ragfuse/sessions"), ask("/v1/ragfuse/schemas")]);
  const waiting = store.waiting_to_be_encoded ? make("p", { class: "quiet" }, `${many(store.waiting_to_be_encoded, "run")} of tokens wait to be encoded.`) : null;
  show(byId("store"), told ? make("p", { role: "status" }, told) : null, waiting, tiers(store, live), sources(store), sessions(talks), schemas(forms));
}
