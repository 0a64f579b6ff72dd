"""What a visitor does on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

QUESTION = "What is the name of the cat that Johan Ekberg took with him?"
PATIENCE_MS = 180_000

CONTRASTS = """() => {
  const parse = (color) => (color.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest(":disabled, .hidden-text, .skip")) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(parse(style.color)), light(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 600);
    const text = walker.currentNode.textContent.trim().slice(0, 60);
    if (ratio < (isLarge ? 3 : 4.5)) found.push(`${ratio.toFixed(2)}: ${text}`);
  }
  return found;
}"""
"""Texts whose contrast is below AA: 4.5, or 3 for large ones."""

UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea, [role=button], [role=tabpanel]")]
  .filter((each) => each.checkVisibility() && !each.textContent.trim() && !each.ariaLabel
    && !(each.labels && each.labels.length) && !each.getAttribute("aria-labelledby"))
  .map((each) => each.outerHTML.slice(0, 120))"""
"""Controls without any name for screen readers."""


def opened(page: Page, address: str, view: str = "try") -> Page:
    """Open the page and wait until it is ready."""
    page.goto(f"{address}/#{view}")
    page.locator("html[data-ready=yes]").wait_for()
    return page


def add_example(page: Page) -> None:
    """Add the example document, unless it is there, and wait until it is encoded."""
    if not page.locator("#documents li", has_text="Skarholm").count():
        page.get_by_role("button", name="Use the example document").click()
    page.locator("#documents li[data-status=ready]", has_text="Skarholm").wait_for(
        timeout=PATIENCE_MS
    )


def add_file(page: Page, file: Path) -> None:
    """Choose a file, and wait until it is encoded."""
    page.locator("#files").set_input_files(file)
    page.locator("#documents li[data-status=ready]").filter(has_text=file.name).wait_for(
        timeout=PATIENCE_MS
    )


def asked(page: Page, question: str = QUESTION) -> Locator:
    """Ask a question, and wait for both answers."""
    page.get_by_label("Question", exact=True).fill(question)
    page.get_by_role("button", name="Ask", exact=True).click()
    return answered(page)


def answered(page: Page) -> Locator:
    """Wait until the newest question is answered on both sides."""
    turn = page.locator(".turn").first
    expect(turn.locator(".verdict")).to_contain_text(
        "answers", ignore_case=True, timeout=PATIENCE_MS
    )
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled(timeout=PATIENCE_MS)
    return turn


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    found: Any = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return max(0, int(found))
