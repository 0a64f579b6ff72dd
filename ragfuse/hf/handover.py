"""Continue a finished prefill with transformers' `generate`, and follow the answer to its end.

`generate` receives the ids of the whole prompt, and a cache without the KV of the last token. The
first forward pass only returns the prefill's logits and restores the last token's KV. Without KV
per token, the first pass computes the rest of the prompt. Later passes are decoding steps
(`hf/decode.py`). Sampling, stopping criteria and logits processors work as usual. Each call uses a
shallow copy of the model with its own `forward`, so many calls can run concurrently.

The work per new token is bounded. A few tokens are detokenised, and stop strings are searched only
in the new text and just before it. The prompt is never searched.
"""

from __future__ import annotations

import copy
import functools
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from threading import Event
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from ragfuse.errors import ModelError, SettingsError
from ragfuse.hf import probe
from ragfuse.hf.cache import CACHE
from ragfuse.hf.decode import Member, Seeded
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.types.texts import partial_match

UNFINISHED = "\ufffd"
"""The character that tokenizers return for incomplete bytes."""
CONTEXT_TOKENS_BEFORE, MAX_PENDING_TOKENS = 8, 64
"""`CONTEXT_TOKENS_BEFORE` earlier tokens are decoded again with new tokens, because a token's text
depends on adjacent tokens. At most `MAX_PENDING_TOKENS` tokens wait for a complete character.
"""
UNSETTLED = re.compile(r" (?:n'?|'[rv]?)?$")
"""Matches a space near the end of a text. Once more text follows, the tokenizer's option
`clean_up_tokenization_spaces` may remove this space.
"""

TextOf = Callable[[Sequence[int]], str]


class Detokenizer:
    """An incremental decoder of token ids. The result equals the text of all ids decoded at once.

    Args:
        text_of: Decodes ids to text.
        hidden: Ids that are not decoded, such as special tokens.
        marks: Maps each special id that is shown, such as markup of tool calls, to the id's text.
        cleans: True if the tokenizer removes spaces (`clean_up_tokenization_spaces`).

    Attributes:
        text: The text so far.
        spans: Characters lo:hi of each mark in `text`.
    """

    def __init__(
        self,
        text_of: TextOf,
        hidden: Collection[int] = (),
        marks: Mapping[int, str] = MappingProxyType({}),
        cleans: bool = False,
    ) -> None:
        self.text, self.spans = "", list[tuple[int, int]]()
        self._text_of, self._hidden, self._marks, self._cleans = text_of, hidden, marks, cleans
        self._window: list[int] = []  # the latest ids that are decoded to text
        self._done = 0  # number of characters of the window's text already in `text`

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, shown: Iterable[str] = ()) -> Detokenizer:
        """Return a decoder that shows special tokens only if they occur in a text of `shown`."""
        every = {
            id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        texts = tuple(shown)
        marks = {
            id: token
            for id, token in every.items()
            if token and any(token in text for text in texts)
        }
        return Detokenizer(
            lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
            frozenset(every),
            marks,
            bool(tokenizer.clean_up_tokenization_spaces),
        )

    def add(self, ids: Iterable[int]) -> str:
        """Add ids; return the text so far, without incomplete characters."""
        for id in ids:
            if id in self._marks:
                self.end()
                self.text += self._marks[id]
                self.spans.append((len(self.text) - len(self._marks[id]), len(self.text)))
            elif id not in self._hidden:
                self._window.append(id)
                self._grow()
        return self.text

    def end(self) -> str:
        """Decode incomplete bytes as replacement characters, and return the whole text."""
        text = self._text_of(self._window)
        self.text += text[self._done :]
        self._done = max(self._done, len(text))
        return self.text

    def visible(self, lo: int, hi: int) -> str:
        """Return text[lo:hi] without marks."""
        edges = [
            lo,
            *(
                edge
                for a, b in self.spans
                if a < hi and b > lo
                for edge in (max(a, lo), min(b, hi))
            ),
            hi,
        ]
        return "".join(self.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))

    def _grow(self) -> None:
        text = self._text_of(self._window)
        n_final = len(text.rstrip(UNFINISHED))
        if self._cleans and (found := UNSETTLED.search(text, max(0, n_final - 4), n_final)):
            n_final = found.start()
        if n_final > self._done:
            self.text += text[self._done : n_final]
            self._done = n_final
        if len(self._window) >= MAX_PENDING_TOKENS:
            self.end()
            self._window = self._window[-CONTEXT_TOKENS_BEFORE:]
            self._done = len(self._text_of(self._window))
        elif len(self._window) >= 2 * CONTEXT_TOKENS_BEFORE and n_final == len(text):
            rest = self._text_of(self._window[-CONTEXT_TOKENS_BEFORE:])
            done = self._done - (len(text) - len(rest))
            if done > 0 and text.endswith(rest):
                self._window, self._done = self._window[-CONTEXT_TOKENS_BEFORE:], done


class StopFinder:
    """An incremental search for the first stop string in a growing text.

    Attributes:
        at: Index in the text where the first stop string begins; -1 if no stop string is found yet.
        stops: The stop strings.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.at, self.stops = -1, tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self.stops), default=0)
        self._seen = 0

    def look(self, text: str, lo: int, hi: int) -> int:
        """Search text[lo:hi]; return the index of the first stop string found so far, or -1.

        `hi` must not decrease between calls.
        """
        if self.at < 0:
            begin = max(lo, self._seen - self._longest + 1)
            self.at = min(
                (at for stop in self.stops if (at := text.find(stop, begin, hi)) >= 0), default=-1
            )
            self._seen = max(self._seen, hi)
        return self.at

    def possible_start(self, text: str, lo: int) -> int:
        """Return the number of characters at the end of text[lo:] that may begin a stop string."""
        return partial_match(text[max(lo, len(text) - self._longest + 1) :], self.stops)


class Follower(StoppingCriteria):
    """A stopping criterion that passes each new token of one `generate` call to a growing answer.

    Generation stops when the answer is complete or an event in `ends` is set.

    Args:
        growing: The answer (`engine.generate.Draft`), which parses token ids and detects the end.
        emit: Called with each piece of the answer's text as soon as the piece is final.
        ends: Events. Each one stops generation when set, for example because the caller left.

    Attributes:
        first_s: `time.perf_counter()` at the first token; None before the first token.
    """

    def __init__(
        self,
        growing: Any,
        emit: Callable[[Any], object] | None = None,
        ends: Iterable[Event] = (),
    ) -> None:
        self.first_s: float | None = None
        self._growing, self._emit, self._ends, self._seen = growing, emit, tuple(ends), 0

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """Return whether the answer has ended, bool [1]. Called after every new token."""
        if self.first_s is None:
            self.first_s = time.perf_counter()
            self._seen = input_ids.shape[1] - 1
        self._growing.add(input_ids[0, self._seen :].tolist())
        self._seen = input_ids.shape[1]
        self._say()
        return torch.tensor(
            [self._growing.over or any(end.is_set() for end in self._ends)], device=input_ids.device
        )

    def end(self) -> None:
        """Finish the answer and emit the remaining text."""
        self._growing.end()
        self._say()

    def _say(self) -> None:
        if self._emit is not None:
            for piece in self._growing.take():
                self._emit(piece)


UNUSABLE = (
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "cache_implementation",
    "cache",
    "past_key_values",
    "inputs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "streamer",
    "stopping_criteria",
)
"""Refused options of `generate`: they need another cache, or are set by this module."""
ONE = ("num_beams", "num_return_sequences")
"""Options of `generate` that must be 1."""


def generate(
    model: HFModel,
    prefill: Prefill,
    options: Mapping[str, Any],
    stopping: Sequence[StoppingCriteria] = (),
    seed: int | None = None,
) -> list[int]:
    """Generate the answer to a prefilled prompt. The answer's KV is appended to the prefill's
    cache.

    Concurrent requests on the model share decoding steps (`hf/decode.py`).

    Args:
        model: The model.
        prefill: The prefilled prompt.
        options: Options of transformers' `generate`. Stop strings in the options have no effect:
            use `stopping`.
        stopping: Additional stopping criteria, called after every new token with all tokens.
        seed: Seed of sampling; the result does not depend on concurrent requests. None means
            torch's global random state.

    Returns:
        The new token ids.

    Raises:
        SettingsError: An option would bypass the prefilled cache, or asks for several sequences.
        ModelError: The model computed NaN for the prompt.
    """
    _refuse(options)
    if bool(prefill.logits.isnan().any()):  # the answer would be empty or noise
        advice = (
            "float16 is too narrow for some models: set dtype to bfloat16 or float32."
            if model.dtype == torch.float16
            else "The weight files may be damaged: copy them again from their source."
        )
        raise ModelError(
            f"The model {model.name} computed NaN (not a number) for this prompt. {advice}"
        )
    ids = torch.tensor([list(prefill.token_ids)], device=model.device)
    draws = Seeded(seed) if seed is not None else nullcontext()
    with model.batcher.member(prefill.cache, model.shared_wiring) as member, draws:
        if prefill.cache is not None:
            prefill.cache.length -= 1  # without the last token, which the first forward restores
        view = _view(model, prefill, member)
        out: Tensor = view.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            stopping_criteria=StoppingCriteriaList(stopping),
            **{CACHE: prefill.cache if prefill.state is None else prefill.state},
            **probe.at_positions(model.model, prefill.positions),
            **_adapted_options(model, options),
        )
    new_ids: list[int] = out[0, ids.shape[1] :].tolist()
    return new_ids


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise SettingsError for options that this module's `generate` does not support."""
    config = options.get("generation_config")
    given = {**(vars(config) if config is not None else {}), **options}
    wrong = [name for name in UNUSABLE if given.get(name) is not None]
    wrong += [name for name in ONE if (given.get(name) or 1) > 1]
    if wrong:
        raise SettingsError(
            f"The option '{wrong[0]}' of transformers' generate is not supported, because ragfuse"
            " generates one answer from KV that already exists. Remove the option."
        )


def resolve_option(name: str, options: Mapping[str, Any], model: HFModel) -> Any:
    """Look up `name` in `options`, then in their generation config, then in the model's config."""
    configs = (options.get("generation_config"), model.model.generation_config)
    found = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in found if value is not None), None)


def stop_strings_of(options: Mapping[str, Any], model: HFModel) -> tuple[str, ...]:
    """Return the stop strings in the options or generation configs; see `resolve_option`."""
    found = resolve_option("stop_strings", options, model) or ()
    return (found,) if isinstance(found, str) else tuple(found)


def _adapted_options(model: HFModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Adapt the options to a prefilled cache; disable stop strings and token healing."""
    full = {
        **options,
        **dict.fromkeys(ONE, 1),
        "use_cache": True,
        "cache_implementation": None,
        "stop_strings": None,
        "token_healing": False,
        "return_dict_in_generate": False,
    }
    config = model.model.generation_config
    if config.pad_token_id is None and "pad_token_id" not in full:
        end = config.eos_token_id
        full["pad_token_id"] = end[0] if isinstance(end, list) else (end if end is not None else 0)
    return full


def _view(model: HFModel, prefill: Prefill, member: Member) -> Any:
    """Return a shallow copy of the model whose first forward pass returns the prefill's logits."""
    view, plain, cache = copy.copy(model.model), model.model.forward, prefill.cache
    is_first = cache is not None

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        # called by something else, such as a logits processor
        if args or kwargs.get(CACHE) is not cache:
            return model.batcher.step(None, functools.partial(plain, *args), kwargs)
        if cache is not None and is_first:
            is_first = False
            cache.length += 1
            return CausalLMOutputWithPast(logits=prefill.logits[None, None], **{CACHE: cache})
        return model.batcher.step(member, plain, kwargs)

    view.__dict__["forward"] = forward
    view.__dict__["_optimize_model_for_decode"] = (
        nullcontext  # the method changes shared modules, so only decoding steps call the method
    )
    return view
