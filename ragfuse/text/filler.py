"""Plain texts that come along: to stand before a chunk while it is encoded, and to see what a model's KV is like."""

from importlib.resources import files


def filler_text() -> str:
    """Paragraphs on unlike things, about 300 tokens, so that a chunk is not the beginning of everything."""
    return _text("filler.txt")


def sample() -> tuple[str, ...]:
    """Texts of many kinds, in a few languages and none, together some 2,000 tokens."""
    return (*_text("sample.txt").split("\n\n"), *filler_text().split("\n\n"))


def _text(name: str) -> str:
    return files("ragfuse.text").joinpath(name).read_text("utf-8").strip()
