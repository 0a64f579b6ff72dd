"""Grammar-constrained decoding: llguidance decides, over the model's own tokenizer, which token may
come next.

A matcher follows each sequence, and a logits processor masks all other tokens. Grammars are defined
by `ragfuse.types.grammar`, and by `ragfuse.text.tool_calls` for tool calls.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from ragfuse.errors import InputError
from ragfuse.hf.held_schema import held_schema
from ragfuse.types.grammar import Grammar

LLMatcher = Any
LLTokenizer = Any
"""Types of llguidance, an optional dependency that is imported only where it is used."""


CACHED_GRAMMARS = 64
"""The most compiled grammars that are kept, so that callers with ever new grammars do not fill the
memory.
"""


def check(grammar: Grammar, what: str = "The grammar") -> None:
    """Raise InputError, with the reason, for a grammar that cannot be compiled; needs no model."""
    _require()
    from llguidance import LLMatcher

    if found := LLMatcher.validate_grammar(_source(grammar)):
        raise InputError(
            f"{what} cannot be compiled: {found.strip()}\nSimplify it, or remove what is named"
            " above."
        )


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer and keeps the `CACHED_GRAMMARS` used last.
    Thread-safe.

    Args:
        tokenizer: The tokenizer.
        n_tokens: Columns of the model's logits; those beyond the tokenizer's ids are never allowed.
        ends: Ids of the end tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, n_tokens: int, ends: Sequence[int]
    ) -> None:
        _require()
        from llguidance.hf import from_tokenizer

        try:
            self.tokens: LLTokenizer = from_tokenizer(
                tokenizer, n_vocab=max(n_tokens, len(tokenizer)), eos_token=list(ends) or None
            )
        except Exception as error:  # the library raises exceptions of many kinds
            raise InputError(
                f"This model's tokenizer cannot be read by llguidance ({error}). Ask without"
                " grammars and tools."
            ) from error
        self._lock = threading.Lock()
        self._compiled: LRUCache[Grammar, LLMatcher] = LRUCache(CACHED_GRAMMARS)
        every = tokenizer.added_tokens_decoder
        added = {str(token): id for id, token in every.items()}
        self._ids = {text: id for text, id in added.items() if self.tokens.is_special_token(id)}
        longest = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a new matcher at the grammar's start; InputError if the grammar cannot be
        compiled.
        """
        from llguidance import LLMatcher

        with self._lock:
            made = self._compiled.get(grammar)
        if made is None:
            made = LLMatcher(self.tokens, _source(grammar), log_level=0)
            if made.is_error():
                raise InputError(
                    f"The grammar cannot be compiled: {made.get_error().strip()}\nCorrect or"
                    " simplify it."
                )
        with self._lock:
            self._compiled[grammar] = made
            return made.deep_copy()

    def literal(self, text: str) -> str:
        """Return a text as a Lark literal, with special tokens written by their ids."""
        parts = self._special.split(text) if self._special is not None else [text]
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part)
            for part in parts
            if part
        )


class GrammarProcessor(LogitsProcessor):
    """Holds the answer of one `generate` call to a grammar: an end token comes only when the text
    is complete.
    """

    def __init__(self, grammars: GrammarCompiler, grammar: Grammar) -> None:
        self._matcher = grammars.matcher(grammar)
        self._seen: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [1, V] with all tokens that are not allowed set to -inf."""
        matcher = self._matcher
        written = [] if self._seen is None else input_ids[0, self._seen :].tolist()
        self._seen = input_ids.shape[1]
        for token in written:
            if not matcher.is_stopped():
                matcher.consume_token(token)
        bits = np.unpackbits(
            np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        bits.resize(scores.shape[1], refcheck=False)
        if matcher.is_error():
            reason = matcher.get_error().strip().partition("\n")[0]  # pages of its state follow
            raise InputError(
                "The answer cannot go on as its grammar wants: no text of it goes on like this, or"
                f" none that ends ({reason}). Simplify the grammar, above all what refers to"
                " itself.",
                "grammar",
            )
        allowed = torch.from_numpy(bits).to(scores.device) > 0
        masked = scores.masked_fill(~allowed, float("-inf"))
        # top_k or top_p took all that is allowed away: the grammar comes first
        if bool(masked.isneginf().all()):
            masked = torch.where(allowed, 0.0, masked)
        return masked


def _source(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own format."""
    from llguidance import LLMatcher

    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(held_schema(grammar.source))
    make: Any = (
        LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    )
    return str(make(grammar.source))


def _require() -> None:
    if find_spec("llguidance") is None:
        raise InputError(
            "Grammars and tools need llguidance, which is not installed: pip install"
            " 'ragfuse-kv[structured]'"
        )
