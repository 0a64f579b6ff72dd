"""How many characters of a text one token stands for at most, by which a text is too long before it is tokenised."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

_COMPOSED = 4
"""Characters that a normal form of Unicode makes one of, at most."""
_GROWS = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
_COMPOSES = frozenset({"NFC", "NFKC"})
_KEEPS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
_SPLITS = frozenset({"Split", "Punctuation"})
_N_BYTES = 256


class TokenLength(NamedTuple):
    """Characters of a text that one token stands for at most, but for those that the tokenizer drops."""

    chars: int
    dropped: str = ""

    def least(self, text: str) -> int:
        """How many tokens a text has at least."""
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.chars)


def token_length(tokenizer: PreTrainedTokenizerBase) -> TokenLength | None:
    """Return how many characters of a text one token stands for at most; None where that is not known.

    It is not where a tokenizer drops some of a text (white space, accents, what it does not know), or has one token
    for a run of unknown characters, however long. Known of tokenizers of Hugging Face's library alone.
    """
    if not tokenizer.is_fast:
        return None
    backend, added = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder.values()
    normalizers, splitters = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    shrinks = math.prod(map(_shrinks, normalizers))
    takes_white_space = any(token.lstrip or token.rstrip for token in added if not token.special)
    if not shrinks or takes_white_space or not all(map(_drops_nothing, splitters)):
        return None
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    has_bytes = any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters))
    dropped = _dropped(backend.model, vocabulary, has_bytes)
    if dropped is None or (dropped and normalizers):
        return None
    return TokenLength(shrinks * max(map(len, vocabulary), default=1), dropped)


def _steps(part: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as its steps, each as the tokenizer's file writes it."""
    if part is None:
        return []
    found = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = found.get("normalizers") or found.get("pretokenizers") or [found]
    return steps


def _shrinks(step: Mapping[str, Any]) -> int:
    """Characters that a normalizer makes one of, at most; 0 for any number."""
    kind, text = step["type"], (step.get("pattern") or {}).get("String", "")
    if kind == "Replace":
        return -(-len(text) // len(step["content"])) if text and step["content"] else 0
    return 1 if kind in _GROWS else _COMPOSED if kind in _COMPOSES else 0


def _drops_nothing(step: Mapping[str, Any]) -> bool:
    """Whether all of a text is in the words that a pre-tokenizer makes of it."""
    return step["type"] in _KEEPS or (step["type"] in _SPLITS and step["behavior"] != "Removed")


def _dropped(model: Any, vocabulary: Collection[str], has_bytes: bool) -> str | None:
    """Characters that have no token, not even an unknown one of their own; None where these are not just a few.

    Of a character of several bytes the last one is enough.
    """
    kind = type(model).__name__
    if kind not in ("BPE", "Unigram"):  # others have one token for a word that they do not know
        return None
    if has_bytes:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        lacks = set(pre_tokenizers.ByteLevel.alphabet()).difference(vocabulary)
        ends = {level.pre_tokenize_str(chr(0x80 + last))[0][0][-1] for last in range(0x40)}
        alone = {chr(byte): level.pre_tokenize_str(chr(byte))[0][0] for byte in range(0x80)}
        return None if lacks & ends else "".join(char for char, written in alone.items() if written in lacks)
    if all(f"<0x{byte:02X}>" in vocabulary for byte in range(_N_BYTES)):
        has_fallback = model.byte_fallback if kind == "BPE" else json.loads(model.__getstate__())["byte_fallback"]
        if has_fallback:
            return ""
    return "" if kind == "BPE" and model.unk_token is not None and not model.fuse_unk else None
