// The API key. The user is asked for the key if the server has keys. Only this browser tab stores the key (sessionStorage).

import { byId } from "./dom.js";

const NAME = "ragfuse-key";
let asking = null;

export function key() {
  return sessionStorage.getItem(NAME) || "";
}

export function forgetKey() {
  sessionStorage.removeItem(NAME);
}

// Ask for the API key; return when the user has entered a key. Several callers share one dialog.
export function askForKey(reason) {
  if (asking) return asking;
  const dialog = byId("key-dialog");
  byId("key-reason").textContent = reason;
  byId("key-input").value = "";
  asking = new Promise((resolve) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      const given = byId("key-input").value.trim();
      if (!given) return;
      sessionStorage.setItem(NAME, given);
      dialog.close();
      asking = null;
      byId("forget-key").hidden = false;
      resolve();
    };
  });
  dialog.oncancel = (event) => event.preventDefault();
  dialog.showModal();
  byId("key-input").focus();
  return asking;
}
