"""Plain text to stand before a chunk while it is encoded, so that it is not the beginning of everything."""

from importlib.resources import files


def stand_in() -> str:
    """Paragraphs on unlike things, about 300 tokens."""
    return files("ragfuse.text").joinpath("stand_in.txt").read_text("utf-8").strip()
