"""An answer held to a grammar: which token may come next, found by llguidance from the model's own tokenizer.

A matcher follows each sequence; a logits processor leaves the allowed tokens. What a grammar says is told in
`ragfuse.grammar` and `text.calls`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ragfuse.errors import InputError
from ragfuse.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import JsonCompileOptions, LLMatcher, LLTokenizer


def check(grammar: Grammar, what: str = "The grammar") -> None:
    """InputError for a grammar that cannot be compiled, and why; needs no model."""
    _require()
    from llguidance import LLMatcher

    found = LLMatcher.validate_grammar(_source(grammar))
    if found:
        raise InputError(f"{what} cannot be compiled: {found.strip()}")


class Grammars:
    """Grammars over one model's tokens, each compiled once. Thread-safe.

    n_tokens: columns of its logits, of which those beyond the tokenizer's ids are never allowed. ends: its end tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, n_tokens: int, ends: Sequence[int]) -> None:
        self.tokens = tokens_of(tokenizer, n_tokens, ends)
        self.ends, self.n_tokens = tuple(ends), n_tokens
        self._lock = threading.Lock()
        self._compiled: dict[Grammar, LLMatcher] = {}

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A new matcher at the grammar's start."""
        from llguidance import LLMatcher

        with self._lock:
            if grammar not in self._compiled:
                made = LLMatcher(self.tokens, _source(grammar))
                if made.is_error():
                    raise InputError(f"The grammar cannot be compiled: {made.get_error().strip()}")
                self._compiled[grammar] = made
            return self._compiled[grammar].deep_copy()

    def is_whole(self, grammar: Grammar, ids: Sequence[int]) -> bool:
        """Whether these ids are all that the grammar wants."""
        matcher = self.matcher(grammar)
        return bool(matcher.consume_tokens(list(ids)) and matcher.is_accepting())

    def processor(self, grammar: Grammar, limit: int | None = None) -> HeldTo:
        """Holds every sequence of one `generate` to a grammar; limit: new tokens it may have."""
        return HeldTo(self, grammar, limit)

    def literal(self, text: str) -> str:
        """A text as Lark has it, tokens of their own as such."""
        return json_literal(text)


class HeldTo(LogitsProcessor):
    """Leaves the tokens that a grammar allows, for each sequence by itself; an end only where it is whole."""

    def __init__(self, grammars: Grammars, grammar: Grammar, limit: int | None) -> None:
        self._grammars, self._grammar, self._limit = grammars, grammar, limit
        self._rows: list[LLMatcher] = []
        self._seen = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores: [B, V], all but allowed tokens at -inf."""
        if not self._rows:
            self._seen = input_ids.shape[1]
            self._rows = [self._grammars.matcher(self._grammar) for _ in range(input_ids.shape[0])]
        news = input_ids[:, self._seen :].tolist()
        self._seen = input_ids.shape[1]
        for matcher, new in zip(self._rows, news, strict=True):
            for token in new:
                if not matcher.is_stopped():
                    matcher.consume_token(token)
        allowed = torch.stack([self._allowed(matcher) for matcher in self._rows]).to(scores.device)
        held = scores.masked_fill(~allowed, float("-inf"))
        dead = held.isneginf().all(dim=1, keepdim=True)  # forbidden from elsewhere: the grammar comes first
        return torch.where(dead & allowed, torch.zeros_like(held), held)

    def _allowed(self, matcher: LLMatcher) -> Tensor:
        """bool [V]."""
        allowed = torch.zeros(self._grammars.n_tokens, dtype=torch.bool)
        if matcher.is_stopped():
            allowed[list(self._grammars.ends)] = True
            return allowed
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed[: len(bits)] = torch.from_numpy(bits[: len(allowed)].astype(bool))
        return allowed


def tokens_of(tokenizer: PreTrainedTokenizerBase, n_tokens: int, ends: Sequence[int]) -> LLTokenizer:
    """A model's tokens as llguidance knows them; InputError for a tokenizer it cannot read."""
    _require()
    from llguidance.hf import from_tokenizer

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError(
            "Grammars and tools need a tokenizer of the `tokenizers` library; this model's is "
            f"{type(tokenizer).__name__}. Ask without them, or load the model with its fast tokenizer."
        )
    try:
        return from_tokenizer(tokenizer, n_vocab=max(n_tokens, len(tokenizer)), eos_token=list(ends) or None)
    except Exception as error:  # whatever the library thinks of it
        raise InputError(
            f"This model's tokenizer cannot be read by llguidance ({error}); ask without tools."
        ) from error


def json_literal(text: str) -> str:
    """A text as a Lark string."""
    import json

    return json.dumps(text) if text else ""


def _source(grammar: Grammar) -> str:
    """A grammar in llguidance's own terms."""
    from llguidance import LLMatcher

    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(grammar.source, overrides=cast("JsonCompileOptions", dict(LAYOUT)))
    make: Any = LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    return str(make(grammar.source))


LAYOUT = (("whitespace_flexible", False), ("item_separator", ", "), ("key_separator", ": "))
"""JSON as `json.dumps` writes it: a small model loses itself in white space."""


def _require() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise InputError(
            "Answers that follow a grammar, and calls of tools, need llguidance: pip install 'ragfuse-kv[structured]'"
        ) from error
