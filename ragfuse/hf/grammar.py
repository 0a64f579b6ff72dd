"""Logits processors for one answer: grammars, compiled by llguidance, and OpenAI's penalties.

`ragfuse.types.grammar` creates grammars, and `ragfuse.text.tool_calls` creates the grammars of tool
calls. Each answer has a matcher, which reads the answer's tokens. Next tokens that the grammar does
not allow are masked. Parts of a JSON schema that cannot be enforced are dropped and logged.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from ragfuse.errors import InputError
from ragfuse.types.grammar import Grammar

log = logging.getLogger("ragfuse")

GUIDANCE = MappingProxyType(
    {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "coerce_one_of": True,
        "lenient": True,
    }
)
"""Options of llguidance: write JSON like `json.dumps`, and drop unsupported keywords."""


LARGEST = 10**15
SMALLEST = 1e-6
"""Default limits of a number's size and step, which keep models from writing endless digits."""
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
PLAIN_VALUES = ("enum", "const", "default", "examples", "required")
"""Keywords whose values are plain values or names, not schemas."""
ELSEWHERE = frozenset({"anyOf", "oneOf", "$ref"})
"""Keywords that may add properties to an object beyond the list in `properties`."""
NUMBER_BOUNDS = ("minimum", "maximum", "multipleOf")
_DAY = (
    r"([12]\d{3}-((0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    r"|[12]\d([02468][048]|[13579][26])-02-29)"
)
_CLOCK = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?"
_ZONE = r"(Z|[+-](0\d|1[0-4]):[0-5]\d)"
FORMATS = MappingProxyType(
    {
        "date": f"^{_DAY}$",
        "time": f"^{_CLOCK}{_ZONE}?$",
        "date-time": f"^{_DAY}T{_CLOCK}{_ZONE}?$",
        "duration": r"^P\d{1,6}DT\d{1,2}H\d{1,2}M\d{1,2}(\.\d{1,6})?S$",
    }
)
"""Patterns for formats; llguidance's patterns allow endless digits or impossible dates."""


@lru_cache(maxsize=256)
def held_schema(source: str) -> str:
    """Return the part of a JSON schema that can be enforced; log the dropped parts.

    The result includes `GUIDANCE`. An object with `properties` allows no further properties. Three
    things lift this limit: `additionalProperties` in the object; `allOf` anywhere in the schema;
    `anyOf`, `oneOf` or `$ref` beside the `properties` of the object or of an enclosing object.

    Args:
        source: A JSON schema as JSON text.
    """
    from llguidance import LLMatcher

    left_out = list[str]()
    held = _held(json.loads(source), "", left_out, '"allOf"' not in source)
    text = json.dumps({**held, "x-guidance": dict(GUIDANCE)})
    is_wrong, notes = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_json_schema(text)
    )
    if left_out := [*left_out, *(() if is_wrong else notes)]:
        log.warning(
            "These parts of the JSON schema are not enforced, so check the answer for them: %s.",
            "; ".join(left_out),
        )
    return text


def _held(schema: Any, path: str, left_out: list[str], closes: bool) -> Any:
    """Copy a schema: limit its numbers, drop unsupported patterns, close objects if `closes`."""
    if isinstance(schema, list):
        return [_held(each, path, left_out, closes) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closes = closes and ("properties" not in schema or ELSEWHERE.isdisjoint(schema))
    made = dict[str, Any]()
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            made[name] = {
                key: _held(each, f"{path}.{key}".lstrip("."), left_out, closes)
                for key, each in value.items()
            }
        elif name in ("anyOf", "oneOf") and isinstance(value, list):
            made[name] = _alternatives(value, path, left_out, closes)
        elif name == "pattern" and isinstance(value, str) and not _is_held(value):
            left_out.append(f"{path or 'the schema'}: pattern {json.dumps(value)}")
        elif name == "format" and value in FORMATS and "pattern" not in schema:
            made["pattern"] = FORMATS[value]
        else:
            made[name] = value if name in PLAIN_VALUES else _held(value, path, left_out, closes)
    if closes and isinstance(made.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return _bounded(made)


def _alternatives(given: list[Any], path: str, left_out: list[str], closes: bool) -> list[Any]:
    """Return the fully enforceable alternatives, or all if only null or none is enforceable."""
    found = list[tuple[Any, list[str]]]()
    for before, each in zip([None, *given], given, strict=False):
        lost = list[str]()
        if (
            each == {"type": "string"}
            and isinstance(before, dict)
            and before.get("type") == "number"
        ):
            lost.append(f"{path or 'the schema'}: a text in place of the number")
        found.append((_held(each, path, lost, closes), lost))
    whole = [each for each, lost in found if not lost]
    if any(each != {"type": "null"} for each in whole):
        return whole
    left_out.extend(note for _, lost in found for note in lost)
    return [each for each, _ in found]


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a number schema with bounds, or unchanged if llguidance rejects it with bounds."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if {"number", "integer"}.isdisjoint(kinds) or "enum" in schema or "const" in schema:
        return schema
    step = SMALLEST if "number" in kinds else 1
    bounded = {"minimum": -LARGEST, "maximum": LARGEST, "multipleOf": step, **schema}
    if "exclusiveMinimum" in bounded:
        bounded["minimum"] = round(bounded.pop("exclusiveMinimum") + step, 6)
    if "exclusiveMaximum" in bounded:
        bounded["maximum"] = round(bounded.pop("exclusiveMaximum") - step, 6)
    is_held = _compiles({name: bounded[name] for name in bounded.keys() & {"type", *NUMBER_BOUNDS}})
    return bounded if is_held else schema


def _is_held(pattern: str) -> bool:
    """Return True if llguidance supports a pattern, or if the pattern is not a valid regex."""
    try:
        re.compile(pattern)
    except re.error:
        return True
    return _compiles({"type": "string", "pattern": pattern})


def _compiles(schema: dict[str, Any]) -> bool:
    from llguidance import LLMatcher

    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


CACHED_GRAMMARS = 64
"""Maximum number of compiled grammars in memory."""


def check(grammar: Grammar, what: str = "The grammar") -> None:
    """Raise InputError with the reason if a grammar does not compile. Needs no model."""
    if find_spec("llguidance") is None:
        raise InputError(
            "Grammars and tools need llguidance. Run: pip install 'ragfuse-kv[structured]'"
        )
    from llguidance import LLMatcher

    if found := LLMatcher.validate_grammar(_source(grammar)):
        raise InputError(
            f"{what} cannot be compiled: {found.strip()}\nCorrect or remove the part named here."
        )


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer; caches up to `CACHED_GRAMMARS`. Thread-safe.

    Args:
        tokenizer: The tokenizer.
        n_tokens: Number of logits per token. Ids that the tokenizer lacks are never allowed.
        ends: Ids of the end tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, n_tokens: int, ends: Sequence[int]
    ) -> None:
        from llguidance.hf import from_tokenizer

        try:
            self.tokens: Any = from_tokenizer(
                tokenizer, n_vocab=max(n_tokens, len(tokenizer)), eos_token=list(ends) or None
            )
        except Exception as error:  # the library raises exceptions of many types
            raise InputError(
                f"The tokenizer of this model cannot be read by llguidance ({error}). Use the"
                " model without grammars and tools."
            ) from error
        self._lock = threading.Lock()
        self._compiled: LRUCache[Grammar, Any] = LRUCache(CACHED_GRAMMARS)
        every = tokenizer.added_tokens_decoder
        added = {str(token): id for id, token in every.items()}
        self._ids = {text: id for text, id in added.items() if self.tokens.is_special_token(id)}
        longest = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None

    def matcher(self, grammar: Grammar) -> Any:
        """Return a new matcher at a grammar's start. Raise InputError if the grammar is invalid."""
        from llguidance import LLMatcher

        with self._lock:
            made = self._compiled.get(grammar)
        if made is None:
            made = LLMatcher(self.tokens, _source(grammar), log_level=0)
            if made.is_error():
                raise InputError(
                    "The grammar cannot be compiled. Correct the grammar:"
                    f" {made.get_error().strip()}"
                )
        with self._lock:
            self._compiled[grammar] = made
            return made.deep_copy()

    def literal(self, text: str) -> str:
        """Return a text as a Lark literal, with special tokens written as ids."""
        parts = self._special.split(text) if self._special is not None else [text]
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part)
            for part in parts
            if part
        )


class GrammarProcessor(LogitsProcessor):
    """Constrains one answer to a grammar; end tokens are allowed once the answer is complete."""

    def __init__(self, grammars: GrammarCompiler, grammar: Grammar) -> None:
        self._matcher = grammars.matcher(grammar)
        self._seen: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [1, V], with -inf for tokens that are not allowed."""
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
            reason = matcher.get_error().strip().partition("\n")[0]  # only the first line
            raise InputError(
                "The answer cannot continue: the grammar allows neither more text nor an end"
                f" ({reason}). Simplify the grammar, especially recursive rules.",
                "grammar",
            )
        allowed = torch.from_numpy(bits).to(scores.device) > 0
        masked = scores.masked_fill(~allowed, float("-inf"))
        # top_k or top_p removed all allowed tokens: the grammar has precedence
        if bool(masked.isneginf().all()):
            masked = torch.where(allowed, 0.0, masked)
        return masked


def _source(grammar: Grammar) -> str:
    """Convert a grammar to llguidance's format."""
    from llguidance import LLMatcher

    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(held_schema(grammar.source))
    make: Any = (
        LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    )
    return str(make(grammar.source))


class Penalties(LogitsProcessor):
    """Lowers the logits of tokens that the answer already has. Tokens of the prompt do not count.

    Args:
        presence: Subtracted once from the logit of every generated token.
        frequency: Subtracted once per occurrence of the token in the answer.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency
        self._from: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the penalised scores [B, V] for the token after `input_ids` int64 [B, T]."""
        if self._from is None:
            self._from = input_ids.shape[1]
        written = input_ids[:, self._from :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, written, torch.ones_like(written, dtype=scores.dtype)
        )
        return scores - self._frequency * counts - self._presence * (counts > 0)
