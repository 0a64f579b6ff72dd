"""Chunks of files."""

from types import SimpleNamespace

from ragfuse.settings import Settings
from ragfuse.text.file_texts import split_text

WORDS = SimpleNamespace(tokenize=str.split)
RETURNS, TRAINS = "Return it within thirty days. " * 4, "Orders travel by rail. " * 5


def chunks_of(text: str) -> list[str]:
    return split_text(text, Settings(chunk_tokens=24, chunk_overlap=0), WORDS)


def test_a_heading_stays_with_the_text_below_it():
    refunds, shipping = f"# Refunds\n\n{RETURNS.strip()}", f"## Shipping\n\n{TRAINS.strip()}"
    assert chunks_of(f"{refunds}\n\n{shipping}\n") == [refunds, shipping]


def test_a_heading_stays_with_a_text_that_fills_a_chunk():
    headings, text = (
        "# All about the Dutch railways\n\n## Freight",
        TRAINS.strip() + " Always, always.",
    )
    assert chunks_of(f"{headings}\n\n{text}") == [f"{headings}\n\n{text}"]


def test_comments_of_a_program_are_no_headings():
    line = "# " + "a comment " * 6
    assert chunks_of("\n".join([line] * 4)) == [line.strip()] * 4


def test_only_the_sizes_of_chunks_matter_for_a_text_without_headings():
    assert chunks_of(f"{RETURNS}\n\n{TRAINS}") == [RETURNS.strip(), TRAINS.strip()]
