"""Tokenises whole prompts exactly as the model's tokenizer does, and pieces of prompts as they
appear inside one.

Many tokenizers (SentencePiece's) put a space before every text that they encode. Pieces get none,
so that a piece has the same ids wherever it stands, and pieces side by side decode to the text that
they were cut from.

What looks like a control token in text from users or documents is encoded as plain text.
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
"""Characters lo:hi of a text."""
Given = tuple[int, int, tuple[int, ...]]
"""Characters lo:hi of a text whose ids are known, and these ids."""
Read = tuple[list[int], list[Chars]]
"""Ids, and the characters of each."""
Place = Literal["start", "border", "middle"]
"""Where a text stands in a prompt: at its beginning, after an added token, or after other text."""

TEXT_PROBES = ("a", "the", "1", "A b")
JOINTS = (("one.\n\n", "Two three"), ("one: ", "two three"), ("one\n", "(two) three"))
_THOUGHT = re.compile("think|thought|reasoning", re.IGNORECASE)
"""Matches the names of tags around reasoning; an added token of such a name is a control token."""
RELEASE_GIL_CHARS = 4096
"""Texts of at least this many characters, or ids, are processed with the GIL released."""
PRIVATE_USE_RANGES = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Unicode's private-use characters, one of which masks what looks like a control token."""


class TextEncoder:
    """Encodes prompts and pieces with one tokenizer, which it does not modify. Thread-safe."""

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
        self._backend.encode_special_tokens = bool(
            getattr(tokenizer, "split_special_tokens", False)
        )
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
        """Return the ids of a text inside a prompt, control tokens encoded as text."""
        return self._encoded(text)[0]

    def template_tokens(self, text: str) -> list[int]:
        """Return the ids of a text that the chat template wrote, with its control tokens."""
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
        """Return the ids that the tokenizer puts before a text at a start or a control token."""
        before = self._put_before("border" if is_behind_token else "start", text)
        first = encoding_of(self._backend, text)
        borders = self._borders(text, first.ids, first.offsets)
        if not before or 0 in (first.offsets[row][0] for row in borders[:1]):
            return []
        return list(encoding_of(self._pieces, before).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as in the middle of a text, control tokens included."""
        head = text_of(self._backend, self._anchor)
        return text_of(self._backend, [*self._anchor, *ids])[len(head) :]

    # what looks like a control token

    def control_spans(self, text: str) -> list[Chars]:
        """Return the characters lo:hi of everything in a text that would be tokenised as a control
        token.

        Letter case is ignored; surrounding white space is not included.
        """
        found = [match.span() for match in self._matcher.finditer(text)] if self._control else []
        if not self._normalised.isdisjoint(self._control_ids):
            # its normalizer may turn other letters into a control token
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
        """Tokenise a whole prompt, by the tokenizer's own rules except for `bare` and `given` text.

        Args:
            text: The prompt.
            bare: Characters that look like a control token and must be encoded as text.
            given: Text whose ids are known, in order; ignored where a token of the whole text
                crosses its ends or these ids read differently.

        Returns:
            The ids, and the characters of each.
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
        """Return the rows of added tokens that are written in the text."""
        added, normalised = self._added, self._normalised
        return [
            row
            for row, id in enumerate(ids)
            if id in added
            and (text[slice(*offsets[row])].strip() == added[id].strip() or id in normalised)
        ]

    # inside

    def _encoded(self, text: str, place: Place = "middle") -> Read:
        """Return the ids of a text at a place in a prompt, and the characters of each id."""
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
        """Return where to split a text so that no control token is built from plain letters."""
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
        begun = {lo for lo, _ in spans}  # nothing is put between two of them
        return [
            (end, "middle" if end in begun else "border") for _, end in spans if 0 < end < len(text)
        ]

    def _put_before(self, place: Place, text: str) -> str:
        if place == "middle" or not text:
            return ""
        return self._before[place][text[0] in " \u2581"]

    def _prefixes(self, head: str | None) -> tuple[str, str]:
        """Return what comes before a text after `head`, and before one that begins with a space."""
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
        """Return an added token without flags (lstrip, rstrip, single_word), or None."""
        tokens = self._tokenizer.added_tokens_decoder.values()
        fit = (
            str(token)
            for token in tokens
            if not (token.lstrip or token.rstrip or token.single_word)
        )
        return next((word for word in fit if self._backend.encode(word).ids), None)

    def _tokenizer_of_pieces(self, backend: Tokenizer, serialised: str) -> Tokenizer:
        """Return `backend` without the prefix of every text, if pieces then decode right."""
        steps = {
            "normalizer": _step(backend.normalizer),
            "pre_tokenizer": _step(backend.pre_tokenizer),
        }
        bare = {name: _without_prefix(step) for name, step in steps.items()}
        candidates = [_copied(serialised)]
        if bare != steps:  # a vocabulary takes a second to parse: only where it must be
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
    """Return what a tokenizer runs on; ModelError for one that is written in Python."""
    if not tokenizer.is_fast:
        raise ModelError(
            "Wanted a fast tokenizer (of the `tokenizers` library), found"
            f" {type(tokenizer).__name__}. Load the model with its fast tokenizer."
        )
    backend: Tokenizer = cast(Any, tokenizer).backend_tokenizer
    return backend


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the tokens that only a chat template may write: special ones, and markup."""
    added = tokenizer.added_tokens_decoder.values()
    template = str(getattr(tokenizer, "chat_template", None) or "")
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
    """Return a tokenizer from its JSON, without truncation and padding."""
    backend = Tokenizer.from_str(serialised)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _step(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer as JSON; None for none."""
    return None if step is None else json.loads(step.__getstate__())


def _without_prefix(spec: Any) -> Any:
    """Drop the steps that put something before a text from a normalizer or pre-tokenizer."""
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
    """Count the joints whose pieces decode as when joined, and those with the same ids."""
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
    """Encode a text; a long one as a batch, which releases the GIL."""
    if len(text) < RELEASE_GIL_CHARS:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode ids, special tokens included; many as a batch, which releases the GIL."""
    if len(ids) < RELEASE_GIL_CHARS:
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    return str(tokenizer.decode_batch([ids], skip_special_tokens=False)[0])
