"""Output of answers on a terminal: the trace as a table, the prompt as a coloured strip, streamed text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ragfuse.types.sizes import size_text

if TYPE_CHECKING:
    from ragfuse.types.answer import StreamTrace, Trace

KIND_WORDS = MappingProxyType({"prefix": "beginning", "history": "earlier turns", "chunk": "a chunk"})
"""How a segment without a source is named."""
REUSED, RECOMPUTED, FRESH = "blue", "dark_orange", "grey50"
SHADES = MappingProxyType({REUSED: "\u2588", RECOMPUTED: "\u2592", FRESH: "\u2591"})
"""What stands for a colour of the strip where there are no colours."""


def show_trace(console: Console, trace: Trace) -> None:
    """Print a trace: what was reused from which tier, and why the rest was not."""
    table = Table("part of the prompt", box=None, pad_edge=False)
    table.add_column("tokens", justify="right")
    for heading in ("from", "recomputed", "why"):
        table.add_column(heading)
    reason = ""
    for segment in trace.segments:
        level = f" as {segment.level}" if segment.level not in ("", "raw") else ""
        where = f"{segment.tier}{level}, {size_text(segment.nbytes)}" if segment.hit else "not stored"
        if segment.hit and not segment.nbytes:
            where = "read above" if trace.nbytes else segment.tier  # a state that is in memory has no bytes to read
        recomputed = "none: exact" if segment.exact else f"{segment.recomputed} tokens" if segment.hit else "all"
        name = Path(segment.source).name if segment.source else KIND_WORDS.get(segment.kind, segment.kind)
        why = "the same" if segment.why and segment.why == reason else segment.why
        table.add_row(Text(short(name)), str(segment.n_tokens), where, recomputed, Text(why))
        reason = segment.why
    if trace.segments:
        console.print(table)
    if trace.dropped:
        names = ", ".join(Path(source).name or "a chunk" for source in trace.dropped)
        console.print(Text(f"left out, so that prompt and answer fit: {names}"))
    if trace.stream is not None:
        _show_stream(console, trace.stream)
    for part in (strip(trace, min(console.width, 100)), legend()):
        console.print(part if _has_colours(console) else shaded(part))
    if trace.fallback_reason:
        summary = f"{trace.tokens} tokens, all [{FRESH}]computed[/]: {escape(trace.fallback_reason)}"
    else:
        chosen = f" ({trace.mean_ratio:.0%}, chosen by the policy {trace.policy})" if trace.tokens_recomputed else ""
        summary = (
            f"{trace.tokens} tokens: [{REUSED}]{trace.tokens_reused} reused[/], [{RECOMPUTED}]"
            f"{trace.tokens_recomputed} recomputed[/]{chosen}, [{FRESH}]{trace.tokens_fresh} computed[/]"
        )
    console.print(f"{summary}; first token after {trace.ttft_s:.2f} s{_of_deadline(trace)}", highlight=False)


def _of_deadline(trace: Trace) -> str:
    """Return whether the first token came in time, as the end of a sentence; "" without a deadline."""
    if trace.deadline_s is None:
        return ""
    return f", {'[bold]after[/]' if trace.is_late else 'within'} the deadline of {trace.deadline_s:g} s"


def legend() -> Text:
    """Return what the colours of the strip mean, each token of the prompt being a part of it."""
    return Text.assemble(
        ("\u2588 ", REUSED),
        "reused from the store  ",
        ("\u2588 ", RECOMPUTED),
        "recomputed  ",
        ("\u2588 ", FRESH),
        "computed",
    )


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def shaded(text: Text) -> Text:
    """Return a text whose coloured blocks are told apart by their shade."""
    characters = list(text.plain)
    for span in text.spans:
        shade = SHADES[str(span.style)]
        part = text.plain[span.start : span.end]
        characters[span.start : span.end] = part.replace("\u2588", shade)
    return Text("".join(characters))


def _show_stream(console: Console, stream: StreamTrace) -> None:
    """Print the pieces of a stream."""
    table = Table("read as", box=None, pad_edge=False)
    for heading in ("tokens", "at s", "size", "s", "MB/s"):
        table.add_column(heading, justify="right")
    table.add_column("why")
    for piece in stream.pieces:
        read = (size_text(piece.nbytes), f"{piece.seconds:.2f}", f"{(piece.throughput or 0.0) / 1e6:.1f}")
        figures = read if piece.seconds else ("", "", "")
        table.add_row(piece.level, str(piece.tokens), f"{piece.began_s:.2f}", *figures, Text(piece.why))
    console.print(table)


def short(name: str) -> str:
    """Shorten a file name to at most 22 characters by leaving out its middle."""
    return name if len(name) <= 22 else f"{name[:9]}...{name[-10:]}"


NAMED = 5
"""Most names in a list of files; what follows is counted."""


def plain(text: str) -> str:
    """Return a text on one line, without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def counted(n: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun, such as "1 text" or "2 texts"."""
    return f"{n:,} {noun if n == 1 else nouns or noun + 's'}"


def names_of(sources: Iterable[str]) -> list[str]:
    """Return the names of documents, with their folder where two have the same name; what has no name is left out."""
    paths = [Path(source) for source in dict.fromkeys(sources) if Path(source).name]
    n_named = Counter(path.name for path in paths)
    names = (path.name if n_named[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in paths)
    return list(dict.fromkeys(map(plain, names)))


def listed(sources: Iterable[str]) -> str:
    """Return the names of documents in a list, `NAMED` of them at most, such as "a.txt, b.txt and 7 more"."""
    names = names_of(sources)
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")


class WrappedOutput:
    """Prints streamed text with line breaks between words at the console's width; `column` is the first column."""

    def __init__(self, console: Console, column: int = 0) -> None:
        self._console, self._column = console, column

    def write(self, text: str) -> None:
        """Print the next piece."""
        for word in re.findall(r"\n|[^\S\n]+|\S+", text):
            if self._console.is_terminal and self._column and self._column + len(word) > self._console.width:
                self._put("\n")
            if word.strip() or word == "\n" or self._column:
                self._put(word)

    def _put(self, word: str) -> None:
        self._console.print(word, end="", markup=False, highlight=False, soft_wrap=True)
        self._column = 0 if word == "\n" else self._column + len(word)


def strip(trace: Trace, width: int) -> Text:
    """Return the prompt as a coloured strip: blue for reused, orange for recomputed, grey for fresh tokens."""
    recomputed = set(trace.recomputed_rows)
    cached = [s for s in trace.segments if s.hit]
    text = Text()
    for column in range(width):
        lo = column * trace.tokens // width
        rows = range(lo, max((column + 1) * trace.tokens // width, lo + 1))
        style = FRESH
        if any(s.start <= lo < s.start + s.n_tokens for s in cached):
            style = RECOMPUTED if sum(row in recomputed for row in rows) * 4 >= len(rows) else REUSED
        text.append("█", style)
    return text


def tell_sources(sources: Iterable[str]) -> None:
    """Say on standard error which documents the passages of a prompt were retrieved from."""
    names = names_of(sources)
    if names:
        line = f"From {', '.join(names)}."
        Console(stderr=True).print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
