"""A radix tree of earlier prompts' token ids, which finds the stored KV of a new prompt's prefix.

An edge can have any number of tokens, as in SGLang. So a shared prefix is found to the exact token,
not in whole blocks as in vLLM. A node names a store entry and a row. The row has the KV of the
first token on the node's edge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ragfuse.types.keys import ChunkKey

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """A span of prompt tokens whose KV is in consecutive rows of an entry, one row per token.

    Args:
        lo: Index of the span's first token in the prompt.
        hi: End of the span in the prompt (exclusive).
        key: Key of the entry.
        row: Row of the entry that holds the KV of token `lo`.
        origin: The prompt position that corresponds to position 0 of the entry.
    """

    lo: int
    hi: int
    key: ChunkKey
    row: int = 0
    origin: int = 0

    def cut(self, lo: int, hi: int) -> Rows:
        """Return the part of this span within tokens `lo` to `hi` (exclusive) of the prompt."""
        first = max(lo, self.lo)
        return replace(self, lo=first, hi=min(hi, self.hi), row=self.row + first - self.lo)


@dataclass(slots=True, eq=False)
class _Node:
    tokens: Ids
    key: ChunkKey | None = None
    row: int = 0
    origin: int = 0
    children: dict[int, _Node] = field(default_factory=dict)

    def split(self, at: int) -> None:
        """Shorten the edge to its first `at` tokens; move the other tokens into a new child."""
        rest = _Node(self.tokens[at:], self.key, self.row + at, self.origin, self.children)
        self.tokens, self.children = self.tokens[:at], {int(rest.tokens[0]): rest}


class RadixTree:
    """The radix tree of earlier prompts' prefixes. Not thread-safe."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int32))
        self.n_nodes = 0

    @property
    def keys(self) -> set[ChunkKey]:
        """Keys of all entries that the tree references."""
        return {node.key for node, _ in self._walk() if node.key is not None}

    def match(self, token_ids: Sequence[int] | Ids) -> list[Rows]:
        """Return the stored spans of a prompt's longest known prefix, in prompt order. Spans omit
        tokens whose entry was discarded.
        """
        ids, found, at = _array(token_ids), list[Rows](), 0
        for node, count in self._path(ids):
            if node.key is not None and count:
                found.append(Rows(at, at + count, node.key, node.row, node.origin))
            at += count
        return merged(found)

    def insert(self, token_ids: Sequence[int] | Ids, parts: Sequence[Rows]) -> set[ChunkKey]:
        """Add a prompt's prefix. `parts` locates the KV: adjacent spans, from token 0 on.

        Nodes that already name an entry are not changed. Return the keys written to nodes.
        """
        ids, inserted, node = _array(token_ids), set[ChunkKey](), self._root
        for part in parts:
            at = part.lo
            while at < part.hi:
                child = node.children.get(int(ids[at]))
                if child is None:
                    child = node.children[int(ids[at])] = _Node(ids[at : part.hi].copy())
                    self.n_nodes += 1
                count = _n_common(child.tokens, ids[at : part.hi])
                if count < len(child.tokens):
                    child.split(count)
                    self.n_nodes += 1
                if child.key is None:
                    child.key, child.origin = part.key, part.origin
                    child.row = part.row + at - part.lo
                    inserted.add(part.key)
                node, at = child, at + count
        return inserted

    def discard(self, keys: Collection[ChunkKey]) -> None:
        """Remove entries from the tree, then remove nodes that have neither entry nor children."""
        for node, parent in reversed(list(self._walk())):
            if node.key in keys:
                node.key = None
            if node.key is None and not node.children:
                del parent.children[int(node.tokens[0])]
                self.n_nodes -= 1

    def holding(self, run: Sequence[int]) -> set[ChunkKey]:
        """Return the keys of entries whose KV depends on the tokens `run`: `run` is in the entry,
        or precedes the entry in the prompt. Tokens are matched as in `holds`.
        """
        wanted, found = _array(_inner(run)).tobytes(), set[ChunkKey]()
        stack = [(self._root, b"")]
        while stack:
            node, before = stack.pop()
            path = before + node.tokens.tobytes()
            if node.key is not None and wanted and _contains(wanted, path):
                found.add(node.key)
            stack += [(child, path) for child in node.children.values()]
        return found

    def _path(self, ids: Ids) -> Iterator[tuple[_Node, int]]:
        """Yield (node, number of matching tokens on its edge) for each node that `ids` reach."""
        node, at = self._root, 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                return
            count = _n_common(child.tokens, ids[at:])
            yield child, count
            if count < len(child.tokens):
                return
            node, at = child, at + count

    def _walk(self) -> Iterator[tuple[_Node, _Node]]:
        """Yield (node, parent) for every node below the root, parents before children."""
        stack = [(child, self._root) for child in self._root.children.values()]
        while stack:
            node, parent = stack.pop()
            yield node, parent
            stack += [(child, node) for child in node.children.values()]


def _array(ids: Sequence[int] | Ids) -> Ids:
    return np.asarray(ids, dtype=np.int32)


def _n_common(one: Ids, other: Ids) -> int:
    """Return the length of the common prefix of two arrays."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count


def holds(token_ids: Sequence[int], run: Sequence[int]) -> bool:
    """Return whether `token_ids` contain the tokens `run` in sequence; False for an empty `run`.

    The first and last token of `run` are ignored if `run` has more than four tokens, because the
    tokenizer may merge these two tokens with the surrounding text of a prompt.
    """
    return bool(run) and _contains(_array(_inner(run)).tobytes(), _array(token_ids).tobytes())


def _inner(run: Sequence[int]) -> Sequence[int]:
    return run[1:-1] if len(run) > 4 else run


def _contains(wanted: bytes, text: bytes) -> bool:
    """Return whether the ids `text` contain the ids `wanted`; both are the bytes of int32 ids."""
    at = text.find(wanted)
    while at >= 0 and at % 4:
        at = text.find(wanted, at + 1)
    return at >= 0


def merged(found: Sequence[Rows]) -> list[Rows]:
    """Merge adjacent spans that are stored in consecutive rows of the same entry."""
    merged: list[Rows] = []
    for each in found:
        longer = replace(merged[-1], hi=each.hi) if merged else each
        if merged and merged[-1].hi == each.lo and longer.cut(each.lo, each.hi) == each:
            merged[-1] = longer
        else:
            merged.append(each)
    return merged
