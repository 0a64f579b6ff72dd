"""Tokenise whole prompts exactly as the model's tokenizer does. Give a piece of text the ids that
the piece has inside a prompt.

Many tokenizers, such as SentencePiece's, put a space before every text. Pieces are encoded without
such a space. So a piece has the same ids anywhere, and adjacent pieces decode to the original text.

Text from users or documents that looks like a control token is encoded as plain text.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain, pairwise
from typing import Any, Literal, cast

from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from ragfuse.errors import ModelError

Chars = tuple[int, int]
"""A span lo:hi of characters in a text."""
Given = tuple[int, int, tuple[int, ...]]
"""(lo, hi, ids): the known token ids of characters lo:hi of a text."""
Read = tuple[list[int], list[Chars]]
"""Token ids, and the span of characters of each token id."""
Place = Literal["start", "border", "middle"]
"""Where a text is in a prompt: at the start, after an added token, or after other text."""

TEXT_PROBES = ("a", "the", "1", "A b")
JOINTS = (("one.\n\n", "Two three"), ("one: ", "two three"), ("one\n", "(two) three"))
_THOUGHT = re.compile("think|thought|reasoning", re.IGNORECASE)
"""Matches names of reasoning tags. Added tokens with such a name are control tokens."""
RELEASE_GIL_CHARS = 4096
"""Minimum number of characters, or of ids, that are processed without the GIL."""
PRIVATE_USE_RANGES = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Unicode's private-use characters. They mask text that looks like a control token."""


class TextEncoder:
    """Encodes prompts and pieces with a tokenizer, which is not modified. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        added, unknown = tokenizer.added_tokens_decoder, tokenizer.unk_token_id
        self._added = {id: str(token) for id, token in added.items()}
        self._control = control_tokens(tokenizer)
        self._control_ids = {
            id for id, word in self._added.items() if word in self._control and id != unknown
        }
        words = sorted(self._control, key=len, reverse=True)
        self._matcher = re.compile("|".join(map(re.escape, words)), re.IGNORECASE)
        serialised = fast_backend(tokenizer).to_str()
        self._backend = _copied(serialised)
        self._backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        self._pieces = self._tokenizer_of_pieces(self._backend, serialised)
        self._anchor = encoding_of(self._pieces, "x").ids[-1:]
        self._before: dict[Place, tuple[str, str]] = {"start": self._prefixes("")}
        self._before["border"] = self._prefixes(self._plain_token())
        self._normalised = {
            id
            for id, token in added.items()
            if self._backend.normalizer is not None and token.normalized and id != unknown
        }

    # pieces

    def tokens(self, text: str) -> list[int]:
        """Return the ids that a text has inside a prompt. Control tokens become plain text."""
        return self._encoded(text)[0]

    def template_tokens(self, text: str) -> list[int]:
        """Return the ids of text that the chat template wrote, which may contain control tokens."""
        with self._lock:
            self._pieces.encode_special_tokens = False
            try:
                encoding = encoding_of(self._pieces, text)
            finally:
                self._pieces.encode_special_tokens = True
        ids, offsets = encoding.ids, encoding.offsets
        if self._before["border"] == ("", ""):
            return ids
        found, done = list[int](), 0
        for row in self._borders(text, ids, offsets):
            lo, hi = offsets[row]
            found += [*self._encoded(text[done:lo], "border" if done else "middle")[0], ids[row]]
            done = hi
        return found + self._encoded(text[done:], "border" if done else "middle")[0]

    def prefix_ids(self, text: str, is_behind_token: bool = False) -> list[int]:
        """Return the ids of the prefix that the tokenizer adds to a text at the start of a prompt.

        If `is_behind_token` is True, the text follows a control token instead.
        """
        before = self._put_before("border" if is_behind_token else "start", text)
        first = encoding_of(self._backend, text)
        borders = self._borders(text, first.ids, first.offsets)
        if not before or 0 in (first.offsets[row][0] for row in borders[:1]):
            return []
        return list(encoding_of(self._pieces, before).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids that occur inside a text, including control tokens."""
        head = text_of(self._backend, self._anchor)
        return text_of(self._backend, [*self._anchor, *ids])[len(head) :]

    # text that looks like a control token

    def control_spans(self, text: str) -> list[Chars]:
        """Return the spans lo:hi of a text that would be tokenised as control tokens.

        Case is ignored. White space before a control token is not included.
        """
        found = [match.span() for match in self._matcher.finditer(text)] if self._control else []
        if not self._normalised.isdisjoint(self._control_ids):
            # the tokenizer's normalizer may turn other characters into a control token
            seen = encoding_of(self._backend, text)
            wanted = self._normalised & self._control_ids
            found += [
                chars for id, chars in zip(seen.ids, seen.offsets, strict=True) if id in wanted
            ]
        return sorted(
            {(hi - len(text[lo:hi].lstrip()), hi) for lo, hi in found if text[lo:hi].strip()}
        )

    # whole prompts

    def read(self, text: str, bare: Sequence[Chars] = (), given: Sequence[Given] = ()) -> Read:
        """Tokenise a whole prompt by the tokenizer's own rules, except the text in `bare` and
        `given`.

        Args:
            text: The prompt.
            bare: Spans of characters that look like a control token but must be encoded as plain
                text.
            given: Spans of text with known ids, in order. A span is ignored if the span begins or
                ends inside a token of the whole text, or if the ids decode to different text.

        Returns:
            The ids, and the span of characters of each id.
        """
        encoding = encoding_of(self._backend, _masked(text, bare))
        ids, offsets = encoding.ids, encoding.offsets
        borders = self._borders(text, ids, offsets) if bare else ()
        hidden = sorted(lo for lo, _ in bare)
        edges = [
            (-1, (0, 0)),
            *((row, offsets[row]) for row in borders),
            (len(ids), (len(text), len(text))),
        ]
        for (before, (_, lo)), (behind, (hi, _)) in reversed([*pairwise(edges)]):
            if bisect_left(hidden, lo) < bisect_left(hidden, hi):
                again, chars = self._encoded(text[lo:hi], "border" if before >= 0 else "start")
                ids[before + 1 : behind] = again
                offsets[before + 1 : behind] = [(a + lo, b + lo) for a, b in chars]
        for lo, hi, known in given:
            first = bisect_left(offsets, lo, key=lambda chars: chars[0])
            stop = bisect_right(offsets, hi, lo=first, key=lambda chars: chars[1])
            is_whole = first < stop and (offsets[first][0], offsets[stop - 1][1]) == (lo, hi)
            if is_whole and self.decode(ids[first:stop]) == self.decode(known):
                ids[first:stop] = known
                offsets[first:stop] = [(lo, hi)] * len(known)
        return ids, offsets

    def _borders(self, text: str, ids: Sequence[int], offsets: Sequence[Chars]) -> list[int]:
        """Return the indices in `ids` of added tokens that occur in the text."""
        added, normalised = self._added, self._normalised
        return [
            row
            for row, id in enumerate(ids)
            if id in added
            and (text[slice(*offsets[row])].strip() == added[id].strip() or id in normalised)
        ]

    # internal

    def _encoded(self, text: str, place: Place = "middle") -> Read:
        """Return the ids of a text at a place in a prompt, and the span of each id."""
        before = self._put_before(place, text)
        n, whole = len(before), before + text
        with self._lock:
            encoding = encoding_of(self._pieces, whole)
        ids, offsets = encoding.ids, encoding.offsets
        found, chars = list[int](), list[Chars]()
        breaks = self._breaks(whole, ids, offsets)
        if not breaks:
            return ids, [(max(0, a - n), max(0, b - n)) for a, b in offsets] if n else offsets
        ends = [*(at for at, _ in breaks), len(whole)]
        first: tuple[int, Place] = (0, "middle")
        for (lo, place), hi in zip([first, *breaks], ends, strict=True):
            part, those = self._encoded(whole[lo:hi], place)
            found += part
            chars += [(max(0, lo + a - n), max(0, lo + b - n)) for a, b in those]
        return found, chars

    def _breaks(
        self, text: str, ids: Sequence[int], offsets: Sequence[Chars]
    ) -> list[tuple[int, Place]]:
        """Return where a text must be split: (index, `Place` of the text after the index). A text
        is split inside plain characters that form a control token, or after added tokens.
        """
        found = list[tuple[int, Place]]()
        for row, id in enumerate(ids):
            if id not in self._control_ids:
                continue
            lo, hi = offsets[row]
            word = text[lo:hi]
            if len(word) > 1 and word.lower() == self._added[id].lower():
                found.append((lo + 1, "middle"))
        if found:
            return found
        if self._before["border"] == ("", ""):
            return []
        spans = [offsets[row] for row in self._borders(text, ids, offsets)]
        begun = {lo for lo, _ in spans}  # the tokenizer adds nothing between two added tokens
        return [
            (end, "middle" if end in begun else "border") for _, end in spans if 0 < end < len(text)
        ]

    def _put_before(self, place: Place, text: str) -> str:
        if place == "middle" or not text:
            return ""
        return self._before[place][text[0] in " \u2581"]

    def _prefixes(self, head: str | None) -> tuple[str, str]:
        """Return the prefixes that the tokenizer puts between `head` and a text: the prefix for a
        text without a leading space, and the prefix for a text with a leading space.
        """
        if head is None:
            return "", ""
        backend, pieces = self._backend, self._pieces
        n = len(encoding_of(backend, head).ids)

        def prefix(texts: Sequence[str]) -> str:
            real = {text: encoding_of(backend, head + text).ids[n:] for text in texts}
            fits = (
                put
                for put in ("", " ")
                if all(encoding_of(pieces, put + text).ids == real[text] for text in texts)
            )
            return next(fits, "")

        return prefix(TEXT_PROBES), prefix([" " + text for text in TEXT_PROBES])

    def _plain_token(self) -> str | None:
        """Return an added token without the flags lstrip, rstrip and single_word, or None."""
        tokens = self._tokenizer.added_tokens_decoder.values()
        fit = (
            str(token)
            for token in tokens
            if not (token.lstrip or token.rstrip or token.single_word)
        )
        return next((word for word in fit if self._backend.encode(word).ids), None)

    def _tokenizer_of_pieces(self, backend: Tokenizer, serialised: str) -> Tokenizer:
        """Return a tokenizer for pieces, which adds no prefix if pieces then decode better."""
        steps = {
            "normalizer": _step(backend.normalizer),
            "pre_tokenizer": _step(backend.pre_tokenizer),
        }
        bare = {name: _without_prefix(step) for name, step in steps.items()}
        candidates = [_copied(serialised)]
        if bare != steps:  # parsing a vocabulary takes a second
            candidates.append(_copied(json.dumps({**json.loads(serialised), **bare})))
        best = max(candidates, key=lambda each: _n_alike(backend, each))
        added = self._tokenizer.added_tokens_decoder.values()
        marks = [copy(token) for token in added if str(token) in self._control]
        for mark in marks:
            mark.special = True
        best.add_special_tokens(marks)
        best.encode_special_tokens = True
        return best


def fast_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a fast tokenizer's backend. Raise ModelError for a tokenizer written in Python."""
    if not tokenizer.is_fast:
        raise ModelError(
            "ragfuse needs a fast tokenizer (of the `tokenizers` library), found"
            f" {type(tokenizer).__name__}. Load the model with a fast tokenizer."
        )
    backend: Tokenizer = cast(Any, tokenizer).backend_tokenizer
    return backend


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the tokens that only a chat template may write: special tokens and markup."""
    added = tokenizer.added_tokens_decoder.values()
    template = str(tokenizer.chat_template or "")
    named = {
        *tokenizer.all_special_tokens,
        *(getattr(tokenizer, "chat_control_tokens", None) or ()),
    }
    words = {str(token) for token in added}
    found = {str(token) for token in added if token.special or str(token) in named}
    found |= {word for word in words if word in template and not word.isalnum()}
    found |= {word for word in words if _THOUGHT.search(word) and _counterpart(word) in words}
    return frozenset(word for word in found if word.strip())


def _counterpart(tag: str) -> str:
    """Return the closing tag of an opening tag, and vice versa."""
    return tag.replace("/", "", 1) if tag[1:2] == "/" else f"{tag[:1]}/{tag[1:]}"


def _copied(serialised: str) -> Tokenizer:
    """Create a tokenizer from serialised JSON, without truncation and padding."""
    backend = Tokenizer.from_str(serialised)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _step(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer as JSON; None if there is none."""
    return None if step is None else json.loads(step.__getstate__())


def _without_prefix(spec: Any) -> Any:
    """Drop the steps of a normalizer or pre-tokenizer that add a prefix to a text."""
    if not isinstance(spec, Mapping):
        return spec
    kind = spec.get("type")
    if kind == "Prepend":
        return None
    if kind == "Metaspace":
        return {**spec, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**spec, "add_prefix_space": False}
    for key in ("normalizers", "pretokenizers"):
        if key in spec:
            inner = [_without_prefix(each) for each in spec[key]]
            return {**spec, key: [each for each in inner if each is not None]}
    return spec


def _n_alike(backend: Tokenizer, pieces: Tokenizer) -> tuple[int, int]:
    """Encode `JOINTS` as two texts and as one; count equal decoded texts, and equal ids."""
    read = same = 0
    for head, tail in JOINTS:
        joint = encoding_of(backend, head + tail).ids
        begun, rest = encoding_of(backend, head).ids, encoding_of(pieces, tail).ids
        read += backend.decode([*begun, *rest], skip_special_tokens=False) == backend.decode(
            joint, skip_special_tokens=False
        )
        same += joint[-len(rest) :] == rest
    return read, same


def _masked(text: str, bare: Sequence[Chars]) -> str:
    """Replace the first character of each bare span by a private-use character."""
    if not bare:
        return text
    used = set(text)
    mask = next(chr(code) for code in chain(*PRIVATE_USE_RANGES) if chr(code) not in used)
    letters = list(text)
    for lo, _ in bare:
        letters[lo] = mask
    return "".join(letters)


def encoding_of(tokenizer: Tokenizer, text: str) -> Encoding:
    """Encode a text. A long text is encoded as a batch, without the GIL."""
    if len(text) < RELEASE_GIL_CHARS:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode ids, including special tokens. Many ids are decoded as a batch, without the GIL."""
    if len(ids) < RELEASE_GIL_CHARS:
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    return str(tokenizer.decode_batch([ids], skip_special_tokens=False)[0])
