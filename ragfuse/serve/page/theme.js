// Dark or light: the system's choice until the user moves the switch. The browser then remembers the user's choice.

import { byId } from "./dom.js";

const NAME = "ragfuse-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function apply() {
  const theme = localStorage.getItem(NAME) || (system.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  const button = byId("theme");
  button.textContent = theme === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colours`);
  return theme;
}

export function startTheme() {
  apply();
  system.addEventListener("change", apply);
  byId("theme").addEventListener("click", () => {
    localStorage.setItem(NAME, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    apply();
  });
}
