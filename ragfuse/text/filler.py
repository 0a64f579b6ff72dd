"""Bundled texts: filler that precedes chunks during encoding, and samples for codec profiles."""

from importlib.resources import files


def filler_text() -> str:
    """Return the filler text: paragraphs on different topics, about 300 tokens."""
    return _text("filler.txt")


def sample() -> tuple[str, ...]:
    """Return sample texts of many kinds, in several languages. The total is about 2,000 tokens."""
    return (*_text("sample.txt").split("\n\n"), *filler_text().split("\n\n"))


def _text(name: str) -> str:
    return files("ragfuse.text").joinpath(name).read_text("utf-8").strip()
