"""A bound on the characters per token, by which a text can be rejected as too long before it is tokenised."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

_COMPOSED = 4
"""The most characters that a Unicode normal form composes into one."""
_GROWS = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
_COMPOSES = frozenset({"NFC", "NFKC"})
_KEEPS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
_SPLITS = frozenset({"Split", "Punctuation"})
_N_BYTES = 256


class TokenLength(NamedTuple):
    """The most characters that one token stands for, not counting characters that the tokenizer drops."""

    chars: int
    dropped: str = ""

    def min_tokens(self, text: str) -> int:
        """Return the least number of tokens that a text can have."""
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.chars)


def token_length(tokenizer: PreTrainedTokenizerBase) -> TokenLength | None:
    """Return the most characters that one token of a tokenizer stands for; None if there is no known bound.

    There is none if the tokenizer drops text (white space, accents, unknown characters), or has one token for a run of
    unknown characters of any length.
    """
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
    """Return the steps of a normalizer or pre-tokenizer, each as in the tokenizer's JSON file."""
    if part is None:
        return []
    found = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = found.get("normalizers") or found.get("pretokenizers") or [found]
    return steps


def _shrinks(step: Mapping[str, Any]) -> int:
    """Return the most characters that a normalizer turns into one; 0 if there is no bound."""
    kind, text = step["type"], (step.get("pattern") or {}).get("String", "")
    if kind == "Replace":
        return -(-len(text) // len(step["content"])) if text and step["content"] else 0
    return 1 if kind in _GROWS else _COMPOSED if kind in _COMPOSES else 0


def _drops_nothing(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps every character of a text."""
    return step["type"] in _KEEPS or (step["type"] in _SPLITS and step["behavior"] != "Removed")


def _dropped(model: Any, vocabulary: Collection[str], has_bytes: bool) -> str | None:
    """Return the characters that get no token at all, not even an unknown token; None if they are too many to list.

    A character of several bytes counts as kept if its last byte has a token.
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
