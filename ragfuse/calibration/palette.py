"""The colours and words of all pictures: a thing has the same ones wherever it is drawn."""

from __future__ import annotations

from types import MappingProxyType

RAGFUSE = "tab:orange"
FULL_PREFILL = "tab:grey"
"""Full prefill, and everything that ragfuse is held against without reuse."""
PREFIX_CACHING = "tab:blue"
"""Prefix caching, vLLM's too."""
TOKEN_COLOURS = ("#2a9d8f", RAGFUSE, "#bab0ac")
"""Of a prompt: tokens that are reused, recomputed and fresh."""

METHODS = MappingProxyType(
    {
        "none": ("plain reuse: chunks encoded alone", "black", "o"),
        "none@filler": ("nothing recomputed", "tab:olive", "s"),
        "query": ("rows that the question attends to (query)", RAGFUSE, "D"),
        "auto": ("what ragfuse takes by itself", RAGFUSE, "*"),
        "lexical": ("rows near the question's words (lexical)", "tab:green", "^"),
        "hkvd": ("rows that change most (hkvd, CacheBlend)", "tab:purple", "v"),
        "hkvd-flat": ("the same, chosen once (hkvd-flat)", "tab:pink", "v"),
        "lego": ("first rows of each chunk (lego)", "tab:brown", "P"),
        "hybrid": ("first rows and those that change most (hybrid)", "tab:cyan", "X"),
        "random": ("rows by chance", FULL_PREFILL, "x"),
    }
)
"""Of a method of `bench quality`: what it is in words, its colour, its mark."""
OTHERS = ("tab:red", "tab:blue", "navy", "teal", "gold", "maroon")


def method_style(name: str, index: int) -> tuple[str, str, str]:
    """Return words, colour and mark of a method; those of an unknown one follow from its place
    among all.
    """
    known = METHODS.get(name)
    return known if known is not None else (name, OTHERS[index % len(OTHERS)], "osD^v"[index % 5])
