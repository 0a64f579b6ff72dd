// Requests to this server. If the server rejects the API key, the user is asked for another key. Other errors are thrown.

import { askForKey, forgetKey, key } from "./key.js";

function headers(body) {
  const found = {};
  if (body !== undefined) found["content-type"] = "application/json";
  if (key()) found.authorization = `Bearer ${key()}`;
  return found;
}

async function send(path, { method, body, signal }) {
  for (;;) {
    let response;
    try {
      response = await fetch(path, {
        method: method || (body === undefined ? "GET" : "POST"),
        headers: headers(body),
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server cannot be reached. Is it still running?");
    }
    if (response.status !== 401) return response;
    const wasGiven = Boolean(key());
    forgetKey();
    await askForKey(wasGiven ? "The server does not know that key. Try another one." : "This server needs an API key.");
  }
}

async function refusal(response) {
  let text = `The server answered with status ${response.status}.`;
  try {
    text = (await response.json()).error.message;
  } catch {
    // the text is not an error in this server's format
  }
  return new Error(text);
}

export async function ask(path, options = {}) {
  const response = await send(path, options);
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// Send a request and call `onEvent` with each server-sent event, parsed from JSON.
export async function stream(path, body, onEvent, signal) {
  const response = await send(path, { body, signal });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      onEvent(found);
    }
  }
}
