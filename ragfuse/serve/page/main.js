// The page: three views behind tabs. Only the visible view sends requests.

import { ask } from "./api.js";
import { byId } from "./dom.js";
import { forgetKey, key } from "./key.js";
import { startLive, stopLive } from "./live.js";
import { showStore } from "./store.js";
import { startTheme } from "./theme.js";
import { startTry } from "./try.js";

const VIEWS = ["try", "store", "live"];

function fail(error) {
  if (error.name !== "AbortError") byId("failure").textContent = error.message;
}

function open(view, focuses = false) {
  byId("failure").textContent = "";
  for (const each of VIEWS) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === view));
    tab.tabIndex = each === view ? 0 : -1;
    byId(each).hidden = each !== view;
  }
  if (focuses) byId(`tab-${view}`).focus();
  if (location.hash.slice(1) !== view) history.replaceState(null, "", `#${view}`);
  if (view === "live") startLive(fail);
  else stopLive();
  if (view === "store") showStore().catch(fail);
}

function startTabs() {
  for (const [at, view] of VIEWS.entries()) {
    byId(`tab-${view}`).addEventListener("click", () => open(view));
    byId(`tab-${view}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) open(VIEWS[(at + step + VIEWS.length) % VIEWS.length], true);
      if (event.key === "Home") open(VIEWS[0], true);
      if (event.key === "End") open(VIEWS[VIEWS.length - 1], true);
    });
  }
  addEventListener("hashchange", () => {
    if (VIEWS.includes(location.hash.slice(1))) open(location.hash.slice(1));
  });
}

async function start() {
  startTheme();
  startTabs();
  byId("forget-key").addEventListener("click", () => {
    forgetKey();
    location.reload();
  });
  try {
    const card = await ask("/v1/ragfuse/model");
    byId("model").textContent = card.max_context
      ? `${card.name}, context of ${card.max_context.toLocaleString("en")} tokens` : card.name;
    byId("forget-key").hidden = !key();
    await startTry(card, fail);
    open(VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "try");
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    fail(error);
  }
}

start();
