"""The colours and words of methods in pictures."""

from __future__ import annotations

from types import MappingProxyType

RAGFUSE = "tab:orange"
METHODS = MappingProxyType(
    {
        "none": ("plain reuse: chunks encoded alone", "black", "o"),
        "none@filler": ("nothing recomputed", "tab:olive", "s"),
        "query": ("rows that the question attends to (query)", RAGFUSE, "D"),
        "auto": ("what ragfuse takes by itself", RAGFUSE, "*"),
        "lexical": ("rows near the question's words (lexical)", "tab:green", "^"),
        "hkvd": ("rows that change most (hkvd, CacheBlend)", "tab:purple", "v"),
        "lego": ("first rows of each chunk (lego)", "tab:brown", "P"),
        "random": ("rows by chance", "tab:grey", "x"),
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
