// The documents of this API key: upload (choose or drop files), progress of encoding, and the choice of documents to search.

import { ask } from "./api.js";
import { byId, make, show } from "./dom.js";
import { EXAMPLE } from "./example.js";
import { bytes, capacity, many } from "./format.js";

const MAX_PDF_NBYTES = 8 * 1024 * 1024;
const POLL_MS = 700;
const PATH = "/v1/ragfuse/documents";
const left = new Set(); // ids of documents that are not searched
let documents = [];
let polling = null;

export function chosenDocuments() {
  return documents.filter((each) => !left.has(each.id) && each.encoded > 0);
}

function fail(message) {
  byId("document-error").textContent = message;
  byId("document-told").textContent = "";
}

async function base64(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("It cannot be read."));
    reader.readAsDataURL(file);
  });
  return url.slice(url.indexOf(",") + 1);
}

async function bodyOf(file) {
  const name = file.name.slice(0, 240);
  if (file.name.toLowerCase().endsWith(".pdf")) {
    if (file.size > MAX_PDF_NBYTES) throw new Error(`It has ${bytes(file.size)}; wanted ${capacity(MAX_PDF_NBYTES)} at most.`);
    return { name, pdf: await base64(file) };
  }
  const text = decoded(await file.arrayBuffer());
  if (text.includes("\u0000")) throw new Error("It is not text. Wanted text or PDF files.");
  return { name, text };
}

// Decode a file as `ragfuse ingest` does: UTF-16 by its byte order mark, else UTF-8, else Windows-1252.
function decoded(data) {
  const [first, second] = new Uint8Array(data.slice(0, 2));
  if (first === 0xff && second === 0xfe) return new TextDecoder("utf-16le").decode(data);
  if (first === 0xfe && second === 0xff) return new TextDecoder("utf-16be").decode(data);
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    return new TextDecoder("windows-1252").decode(data);
  }
}

async function send(files) {
  fail("");
  const failures = [];
  for (const file of files) {
    try {
      await ask(PATH, { body: await bodyOf(file) });
    } catch (error) {
      failures.push(`${file.name}: ${error.message}`);
    }
    await refresh();
  }
  fail(failures.join(" "));
}

function state(each) {
  if (each.status === "failed") return each.error;
  if (each.status === "ready") {
    const parts = [many(each.passages, "passage")];
    if (each.nbytes) parts.push(`${bytes(each.nbytes)} of KV encoded`);
    if (each.error) parts.push(each.error);
    return parts.join(", ");
  }
  if (each.status === "encoding") return `encoding ${each.encoded} of ${each.passages} passages`;
  return each.status === "reading" ? "reading" : "waiting";
}

function row(each) {
  const box = make("input", { type: "checkbox", checked: !left.has(each.id), disabled: each.encoded === 0 });
  box.addEventListener("change", () => {
    if (box.checked) left.delete(each.id);
    else left.add(each.id);
  });
  const isRunning = ["waiting", "reading", "encoding"].includes(each.status);
  return make("li", { "data-status": each.status },
    make("div", { class: "row" },
      make("label", { class: "grow name" }, box, make("span", {}, each.name)),
      make("button", { class: "small", "aria-label": `Delete ${each.name}`, onclick: () => remove(each) }, "Delete")),
    isRunning ? make("progress", { max: each.passages || 1, value: each.encoded, "aria-label": `Encoding ${each.name}` }) : null,
    make("div", { class: each.status === "failed" ? "error" : "quiet" }, state(each)));
}

async function remove(each) {
  fail("");
  try {
    const { nbytes } = await ask(`${PATH}/${encodeURIComponent(each.id)}`, { method: "DELETE" });
    byId("document-told").textContent = `${each.name} was deleted, and ${bytes(nbytes)} of KV freed.`
      + (each.nbytes && !nbytes ? " KV that was stored before, or that another source shares, is kept." : "");
  } catch (error) {
    fail(error.message);
  }
  await refresh();
}

// Show the list of documents, again and again while a document is being encoded. A focused button stays focused.
export async function refresh() {
  clearTimeout(polling);
  documents = (await ask(PATH)).data;
  const list = byId("documents");
  const at = [...list.querySelectorAll("input, button")].indexOf(document.activeElement);
  show(list, documents.map(row));
  if (at >= 0) [...list.querySelectorAll("input, button")][at]?.focus();
  if (documents.some((each) => !["ready", "failed"].includes(each.status))) {
    polling = setTimeout(() => refresh().catch((error) => fail(error.message)), POLL_MS);
  }
}

export async function startDocuments() {
  const drop = byId("drop");
  byId("files").addEventListener("change", async (event) => {
    await send([...event.target.files]);
    event.target.value = "";
  });
  byId("example").addEventListener("click", () => send([new File([EXAMPLE], "The lighthouse of Skarholm.txt")]));
  for (const kind of ["dragover", "dragenter"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    send([...event.dataTransfer.files]);
  });
  await refresh();
}
