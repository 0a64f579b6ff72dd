"""Grammar-constrained decoding: llguidance decides, over the model's own tokenizer, which token may come next.

A matcher follows each sequence, and a logits processor masks all other tokens. Grammars are defined by
`ragfuse.types.grammar`, and by `ragfuse.text.tool_calls` for tool calls.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ragfuse.errors import InputError
from ragfuse.hf.endless_schema import endless_reference
from ragfuse.hf.shortest_end import OUTSIDE, ShortestEnd, allowed_by
from ragfuse.types.grammar import Grammar

LLMatcher = Any
LLTokenizer = Any
"""Types of llguidance, an optional dependency that is imported only where it is used."""


CACHED_GRAMMARS = 64
"""The most compiled grammars that are kept, so that callers with ever new grammars do not fill the memory."""


def check(grammar: Grammar, what: str = "The grammar") -> None:
    """Raise InputError, with the reason, for a grammar that cannot be compiled or met; needs no model."""
    _require()
    from llguidance import LLMatcher

    try:
        found = LLMatcher.validate_grammar(_source(grammar))
    except ValueError as error:  # numbers that JSON does not have
        found = str(error)
    if found:
        raise InputError(f"{what} cannot be compiled: {found.strip()}\nSimplify it, or remove what is named above.")
    if grammar.kind == "json" and (name := endless_reference(grammar.source)) is not None:
        raise InputError(
            f"{what} cannot be met: all that '{name:.80}' allows holds itself again, so its JSON never ends.\n"
            "Leave the property that refers to it out of 'required', or allow null beside it."
        )


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer and keeps the `CACHED_GRAMMARS` used last. Thread-safe.

    Args:
        tokenizer: The tokenizer.
        n_tokens: Columns of the model's logits; those beyond the tokenizer's ids are never allowed.
        ends: Ids of the end tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, n_tokens: int, ends: Sequence[int]) -> None:
        self.tokens = tokens_of(tokenizer, n_tokens, ends)
        self.ends, self.n_tokens = tuple(ends), n_tokens
        self._lock = threading.Lock()
        self._compiled: dict[Grammar, LLMatcher] = {}  # least recently used first
        self._shortest_end: ShortestEnd | None = None
        every = tokenizer.added_tokens_decoder
        added = {str(token): id for id, token in every.items()}
        self._ids = {text: id for text, id in added.items() if self.tokens.is_special_token(id)}
        longest = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a new matcher at the grammar's start; InputError if the grammar cannot be compiled or met."""
        with self._lock:
            made = self._compiled.pop(grammar, None)
            if made is not None:
                self._compiled[grammar] = made  # the last one now
                return made.deep_copy()
        made = self._new_matcher(grammar)
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > CACHED_GRAMMARS:
                del self._compiled[next(iter(self._compiled))]
            return made.deep_copy()

    def _new_matcher(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        made = LLMatcher(self.tokens, _source(grammar), log_level=0)
        if made.is_error():
            raise InputError(f"The grammar cannot be compiled: {made.get_error().strip()}\nCorrect or simplify it.")
        begun = made.deep_copy()
        begun.consume_tokens(begun.compute_ff_tokens())  # what all of its texts begin with
        if not begun.is_stopped():
            begun.compute_bitmask()
        if begun.is_error():
            raise InputError(
                f"The grammar cannot be met: no text of it ends ({_reason(begun)}).\n"
                "Give each rule and schema that refers to itself another choice, which does not."
            )
        return made

    def is_whole(self, grammar: Grammar, ids: Sequence[int]) -> bool:
        """Whether these ids are a complete text of the grammar."""
        matcher = self.matcher(grammar)
        return bool(matcher.consume_tokens(list(ids)) and matcher.is_accepting())

    def processor(
        self, grammar: Grammar, limit: int | None = None, is_sampled: bool = False, exits: Sequence[str] = ()
    ) -> GrammarProcessor:
        """Return a logits processor that holds every sequence of one `generate` call to a grammar.

        Args:
            grammar: The grammar.
            limit: The most new tokens; None: no limit.
            is_sampled: Whether tokens are sampled, not chosen greedily.
            exits: Texts that end free text in the grammar that neither quotes nor brackets end.
        """
        return GrammarProcessor(self, grammar, limit, is_sampled, [self.tokens.tokenize_str(text) for text in exits])

    def shortest_end(self) -> ShortestEnd:
        """Return the search for short completions over this tokenizer, made once."""
        with self._lock:
            if self._shortest_end is None:
                self._shortest_end = ShortestEnd(self.tokens, min(self.n_tokens, self.tokens.vocab_size))
            return self._shortest_end

    def literal(self, text: str) -> str:
        """Return a text as a Lark literal, with special tokens written by their ids."""
        parts = self._special.split(text) if self._special is not None else [text]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part) for part in parts if part)


class _Row:
    """One sequence: its matcher, and the tokens of a short completion if one is known."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher, self.within = matcher, OUTSIDE
        self.completion: list[int] | None = None
        self.completions: dict[int, list[int]] = {}  # by next token, the rest of a completion after it
        self.is_over = False  # an end token came; what follows it is padding


class GrammarProcessor(LogitsProcessor):
    """A logits processor that allows only tokens of a grammar, and an end token only when the text is complete.

    Near the token limit it allows only tokens from which the text can still be completed in time: some of the most
    likely tokens, else the next token of the shortest known completion.
    """

    def __init__(
        self,
        grammars: GrammarCompiler,
        grammar: Grammar,
        limit: int | None,
        is_sampled: bool,
        exits: Sequence[Sequence[int]] = (),
    ) -> None:
        self._grammars, self._grammar, self._limit, self._exits = grammars, grammar, limit, exits
        self._likely = 12 if is_sampled else 1
        self._rows: list[_Row] = []
        self._from = self._seen = self._near = 0
        self._is_hard = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [B, V] with all tokens that are not allowed set to -inf."""
        if not self._rows:
            self._begin(*input_ids.shape)
        new_ids = input_ids[:, self._seen :].tolist()
        self._seen = input_ids.shape[1]
        for row, ids in zip(self._rows, new_ids, strict=True):
            self._advance(row, ids)
        n_left = None if self._limit is None else self._limit - (self._seen - self._from)
        masked = [self._masked(row, line, n_left) for row, line in zip(self._rows, scores, strict=True)]
        return torch.stack(masked)

    def _begin(self, n_rows: int, n_tokens: int) -> None:
        self._from = self._seen = n_tokens
        self._rows = [_Row(self._grammars.matcher(self._grammar)) for _ in range(n_rows)]
        if self._limit is not None:
            row, shortest_end = self._rows[0], self._grammars.shortest_end()
            completion = shortest_end.greedy(row.matcher, row.within, self._limit, self._exits)
            self._near = NEAR + 2 * len(completion) if completion is not None else 0
            if completion is None:
                completion = shortest_end.search(row.matcher, row.within, self._limit)
                self._near, self._is_hard = SLACK + 2 * len(completion) if completion is not None else 0, True
            for row in self._rows:
                row.completion = completion

    def _advance(self, row: _Row, tokens: Sequence[int]) -> None:
        """Advance a sequence by the tokens written since the last call."""
        for token in tokens:
            row.is_over = row.is_over or token in self._grammars.ends
            if row.is_over or row.matcher.is_stopped():
                continue
            row.matcher.consume_token(token)
            if self._limit is not None:
                row.within = row.within.after(self._grammars.shortest_end().text(token))
                ahead = row.completion[1:] if row.completion and row.completion[0] == token else None
                row.completion = row.completions.get(token, ahead)
        row.completions = {}

    def _masked(self, row: _Row, scores: Tensor, n_left: int | None) -> Tensor:
        """Mask the scores [V] of one sequence; left: tokens until the limit."""
        n_tokens = len(scores)
        if row.matcher.is_stopped():
            allowed = torch.zeros(n_tokens, dtype=torch.bool)
            allowed[list(self._grammars.ends)] = True
        else:
            allowed = torch.from_numpy(allowed_by(row.matcher, n_tokens))
        if row.matcher.is_error() and not row.is_over:
            raise InputError(
                f"The answer cannot go on as its grammar wants: no text of it goes on like this, or none that ends "
                f"({_reason(row.matcher)}). Simplify the grammar, above all what refers to itself.",
                "grammar",
            )
        allowed = allowed.to(scores.device)
        masked = scores.masked_fill(~allowed, float("-inf"))
        if bool(masked.isneginf().all()):  # forbidden from elsewhere: the grammar comes first
            masked = torch.where(allowed, torch.zeros_like(masked), masked)
        if n_left is None or n_left > self._near or row.matcher.is_stopped():
            return masked
        return self._steered(row, masked, n_left)

    def _steered(self, row: _Row, masked: Tensor, n_left: int) -> Tensor:
        """Allow only tokens after which the text can still be completed within the limit."""
        shortest_end = self._grammars.shortest_end()
        if row.completion is None:
            here = row.matcher, row.within, n_left
            row.completion = shortest_end.search(*here) if self._is_hard else shortest_end.greedy(*here, self._exits)
        if row.completion is None or (self._is_hard and len(row.completion) + SLACK < n_left):
            return masked
        if self._is_hard:
            return _only(masked, row.completion[:1] or list(self._grammars.ends))
        for token in masked.topk(min(self._likely + 3, len(masked))).indices.tolist():
            if masked[token].isneginf() or (self._likely == 1 and row.completions):
                break
            then = row.matcher.deep_copy()
            if token in self._grammars.ends:
                row.completions[token] = []
            elif then.consume_token(token):
                completion = shortest_end.greedy(
                    then, row.within.after(shortest_end.text(token)), n_left - 1, self._exits
                )
                row.completions.update({token: completion} if completion is not None else {})
        return _only(masked, list(row.completions) or row.completion[:1])


def _only(scores: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the scores with all but these tokens set to -inf; 0 for these where all are forbidden elsewhere."""
    only, some = torch.full_like(scores, float("-inf")), list(tokens)
    only[some] = torch.zeros_like(scores[some]) if bool(scores[some].isneginf().all()) else scores[some]
    return only


NEAR = 128
"""Completion is enforced when fewer tokens than this, plus twice the shortest answer, are left before the limit."""
SLACK = 12
"""Spare tokens for a completion that took a long search, which is not repeated after every token."""


def tokens_of(tokenizer: PreTrainedTokenizerBase, n_tokens: int, ends: Sequence[int]) -> LLTokenizer:
    """Return llguidance's tokenizer for a model; InputError for a tokenizer that it cannot read."""
    _require()
    from llguidance.hf import from_tokenizer

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError(
            "Grammars and tools need a fast tokenizer (of the `tokenizers` library), this model's is "
            f"{type(tokenizer).__name__}. Ask without grammars and tools, or load the model with its fast tokenizer."
        )
    try:
        return from_tokenizer(tokenizer, n_vocab=max(n_tokens, len(tokenizer)), eos_token=list(ends) or None)
    except Exception as error:  # the library raises exceptions of many kinds
        raise InputError(
            f"This model's tokenizer cannot be read by llguidance ({error}). Ask without grammars and tools."
        ) from error


def _reason(matcher: LLMatcher) -> str:
    """Return the first line of a stopped matcher's error, which may be followed by pages of its state."""
    lines = matcher.get_error().strip().splitlines()
    return lines[0].removeprefix("parser error: ") if lines else "no token is allowed"


def _source(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own format."""
    from llguidance import LLMatcher

    if grammar.kind == "json":
        layout: Any = dict(LAYOUT)
        return LLMatcher.grammar_from_json_schema(grammar.source, overrides=layout)
    make: Any = LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    return str(make(grammar.source))


LAYOUT = (("whitespace_flexible", False), ("item_separator", ", "), ("key_separator", ": "))
"""JSON layout of `json.dumps`: with free white space a small model may write nothing else."""


def is_installed() -> bool:
    """Return whether llguidance, which grammars need, is installed."""
    return find_spec("llguidance") is not None


def _require() -> None:
    if not is_installed():
        raise InputError(
            "Grammars and tools need llguidance, which is not installed: pip install 'ragfuse-kv[structured]'"
        )
