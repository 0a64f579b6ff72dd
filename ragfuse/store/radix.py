"""Token ids of earlier prompts as a radix tree: which entries of KV a new prompt's beginning can be read from.

The tree of vLLM and SGLang, with edges as long as they are alike: no block size, so every token that two prompts share
is found. A node names an entry of the store and which of its rows the edge is; the KV itself is the store's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ragfuse.types.keys import ChunkKey

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens lo:hi of a prompt, whose KV is in rows `row`, `row + 1` ... of an entry.

    origin: the position in the prompt that the entry's position 0 stands for.
    """

    lo: int
    hi: int
    key: ChunkKey
    row: int = 0
    origin: int = 0

    def cut(self, lo: int, hi: int) -> Rows:
        """Only its tokens between two places of the prompt."""
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
        """Keep the first `at` tokens; a child takes the others."""
        rest = _Node(self.tokens[at:], self.key, self.row + at, self.origin, self.children)
        self.tokens, self.children = self.tokens[:at], {int(rest.tokens[0]): rest}


class RadixTree:
    """What is known of earlier prompts' beginnings. Not thread-safe: `PrefixCache` holds the lock."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int32))
        self.n_nodes = 0

    @property
    def n_tokens(self) -> int:
        """Tokens of all edges."""
        return sum(len(node.tokens) for node, _ in self._walk())

    @property
    def keys(self) -> set[ChunkKey]:
        """Every entry that a node names."""
        return {node.key for node, _ in self._walk() if node.key is not None}

    def match(self, token_ids: Sequence[int] | Ids) -> list[Rows]:
        """The longest beginning that was met before, in order; tokens of a node without an entry are left out."""
        ids, found, at = _array(token_ids), list[Rows](), 0
        for node, count in self._path(ids):
            if node.key is not None and count:
                found.append(Rows(at, at + count, node.key, node.row, node.origin))
            at += count
        return _merged(found)

    def insert(self, token_ids: Sequence[int] | Ids, parts: Sequence[Rows]) -> set[ChunkKey]:
        """Remember a prompt's beginning. `parts` follow each other from 0 on and end at most where the ids do.

        Nodes that name an entry keep it; those that name none take the part's. Returns the keys that were taken.
        """
        ids, taken = _array(token_ids), set[ChunkKey]()
        end = parts[-1].hi if parts else 0
        node, at, which = self._root, 0, 0
        while at < end:
            while parts[which].hi <= at:
                which += 1
            part = parts[which]
            child = node.children.get(int(ids[at]))
            if child is None:
                rows = part.cut(at, part.hi)
                child = _Node(ids[rows.lo : rows.hi].copy(), rows.key, rows.row, rows.origin)
                node.children[int(ids[at])] = child
                self.n_nodes += 1
                taken.add(rows.key)
            count = _alike(child.tokens, ids[at:end])
            if child.key is None:
                count = min(count, part.hi - at)
            if count < len(child.tokens):
                child.split(count)
                self.n_nodes += 1
            if child.key is None:
                rows = part.cut(at, at + count)
                child.key, child.row, child.origin = rows.key, rows.row, rows.origin
                taken.add(rows.key)
            node, at = child, at + count
        return taken

    def discard(self, gone: Collection[ChunkKey] | Callable[[ChunkKey], bool]) -> None:
        """Forget entries; nodes that lead nowhere any more go too."""
        is_gone = gone if callable(gone) else gone.__contains__
        self._prune(lambda node: node.key is not None and is_gone(node.key))

    def holding(self, run: Sequence[int]) -> set[ChunkKey]:
        """Entries of all nodes at or behind which these tokens stand in a row, as `holds` has it."""
        wanted, found = _array(_inner(run)).tobytes(), set[ChunkKey]()
        if not wanted:
            return found
        stack: list[tuple[_Node, bytes, bool]] = [(self._root, b"", False)]
        while stack:
            node, before, held = stack.pop()
            text = before + node.tokens.tobytes()
            held = held or _stands_in(wanted, text)
            if held and node.key is not None:
                found.add(node.key)
            tail = text[-(len(wanted) - 4) :] if len(wanted) > 4 else b""
            stack += [(child, tail, held) for child in node.children.values()]
        return found

    def _path(self, ids: Ids) -> Iterator[tuple[_Node, int]]:
        """Nodes along the ids from the root on, each with how many of its tokens agree."""
        node, at = self._root, 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                return
            count = _alike(child.tokens, ids[at:])
            yield child, count
            if count < len(child.tokens):
                return
            node, at = child, at + count

    def _walk(self) -> Iterator[tuple[_Node, _Node]]:
        """Every node with its parent, parents first."""
        stack = [(child, self._root) for child in self._root.children.values()]
        while stack:
            node, parent = stack.pop()
            yield node, parent
            stack += [(child, node) for child in node.children.values()]

    def _prune(self, is_gone: Callable[[_Node], bool]) -> None:
        for node, parent in reversed(list(self._walk())):
            if is_gone(node):
                node.key = None
            if node.key is None and not node.children:
                del parent.children[int(node.tokens[0])]
                self.n_nodes -= 1


def _array(ids: Sequence[int] | Ids) -> Ids:
    return np.asarray(ids, dtype=np.int32)


def _alike(one: Ids, other: Ids) -> int:
    """How many ids two beginnings share."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count


def holds(token_ids: Sequence[int], run: Sequence[int]) -> bool:
    """Whether a run of tokens stands in others. Its first and last token do not count: in a prompt they may be joined
    with what stands beside them."""
    return bool(run) and _stands_in(_array(_inner(run)).tobytes(), _array(token_ids).tobytes())


def _inner(run: Sequence[int]) -> Sequence[int]:
    return run[1:-1] if len(run) > 4 else run


def _stands_in(wanted: bytes, text: bytes) -> bool:
    """Whether 4-byte ids stand in others in a row."""
    at = text.find(wanted)
    while at >= 0 and at % 4:
        at = text.find(wanted, at + 1)
    return at >= 0


def _merged(found: Sequence[Rows]) -> list[Rows]:
    """Neighbours that are rows of one entry in a row, as one."""
    merged: list[Rows] = []
    for each in found:
        last = merged[-1] if merged else None
        follows = last is not None and last.key == each.key and last.origin == each.origin
        if last is not None and follows and last.hi == each.lo and last.row + last.hi - last.lo == each.row:
            merged[-1] = replace(last, hi=each.hi)
        else:
            merged.append(each)
    return merged
