// Code that asks the same question, with the same prompt, from curl, LangChain or LlamaIndex.

import { make } from "./dom.js";
import { key } from "./key.js";

function textOf(content) {
  return typeof content === "string" ? content : content.map((part) => part.text).join("");
}

function python(messages) {
  const rows = messages.map((each) => `    (${JSON.stringify(each.role)}, ${JSON.stringify(textOf(each.content))}),`);
  return `messages = [\n${rows.join("\n")}\n]`;
}

function codes(body) {
  const base = `${location.origin}/v1`;
  const secret = key() ? ", api_key=YOUR_KEY" : "";
  const header = key() ? ` \\\n  -H "authorization: Bearer YOUR_KEY"` : "";
  const options = Object.keys(body.ragfuse).filter((name) => name !== "token_trace");
  const ragfuse = Object.fromEntries(options.map((name) => [name, body.ragfuse[name]]));
  const reuse = options.map((name) => `, ${name}=${JSON.stringify(ragfuse[name])}`).join("");
  const request = { ...body, ragfuse: options.length ? ragfuse : undefined };
  return {
    curl: `curl ${base}/chat/completions -H "content-type: application/json"${header} -d @- <<'END'\n${JSON.stringify(request, null, 1)}\nEND`,
    LangChain: `from langchain_ragfuse import ChatRagFuse\n\nllm = ChatRagFuse(base_url="${base}"${secret}, max_tokens=${body.max_tokens}${reuse})\n${python(body.messages)}\nanswer = llm.invoke(messages)\nprint(answer.text)\nprint(answer.response_metadata["ragfuse"]["tokens_reused"])`,
    LlamaIndex: `from llama_index.core.llms import ChatMessage\nfrom llama_index.llms.ragfuse import RagFuseLLM\n\nllm = RagFuseLLM(base_url="${base}"${secret}, max_tokens=${body.max_tokens}${reuse})\n${python(body.messages)}\nanswer = llm.chat([ChatMessage(role=role, content=text) for role, text in messages])\nprint(answer.message.content)\nprint(answer.raw["ragfuse"]["tokens_reused"])`,
  };
}

let number = 0;

export function same(body) {
  const found = codes(body);
  const names = Object.keys(found);
  number += 1;
  const panel = make("pre", { class: "code", tabIndex: 0, role: "tabpanel", id: `code-${number}`, "aria-label": `As ${names[0]}` });
  const tabs = names.map((name) => make("button", { type: "button", role: "tab", "aria-controls": panel.id }, name));
  let shown = names[0];
  const open = (name) => {
    shown = name;
    panel.textContent = found[name];
    panel.setAttribute("aria-label", `As ${name}`);
    tabs.forEach((tab) => tab.setAttribute("aria-selected", String(tab.textContent === name)));
  };
  tabs.forEach((tab) => tab.addEventListener("click", () => open(tab.textContent)));
  open(shown);
  const copy = make("button", { type: "button", class: "small", onclick: async () => {
    await navigator.clipboard.writeText(found[shown]);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  } }, "Copy");
  copy.hidden = !navigator.clipboard;
  return make("details", { class: "codes" },
    make("summary", {}, "The same as curl, LangChain, LlamaIndex"),
    make("div", { class: "stack" },
      make("div", { class: "row" }, make("div", { class: "tabs grow", role: "tablist", "aria-label": "Programs" }, tabs), copy),
      make("p", { class: "quiet" }, "The passages are found in the prompt by their text, wherever they stand."),
      panel));
}
