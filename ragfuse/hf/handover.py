"""From a finished prefill to `generate`, with everything transformers offers there.

`generate` gets the whole prompt's ids and a cache that lacks only the last row; its first forward is answered with the
logits that the prefill already computed, and reveals that row. So nothing is computed twice, and sampling, stop
strings, streamers, beams and logits processors work as ever. Its other forwards are steps of `decode.py`.

`generate` is called on a copy of the model object that shares all but its forward: so many can run at the same time.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from ragfuse.errors import RefusedError, SettingsError
from ragfuse.hf import probe
from ragfuse.hf.cache import RowCache
from ragfuse.hf.decode import Member
from ragfuse.hf.hooks import Wiring
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.hf.seed import seeded
from ragfuse.hf.stream import Spelling, StopWhere, UntilStop

log = logging.getLogger("ragfuse.hf")


class Streamer(Protocol):
    """What transformers hands the tokens to as they come."""

    def put(self, value: Tensor) -> None:
        """The prompt's ids first, then one step's after the other."""
        ...

    def end(self) -> None:
        """No more will come."""
        ...


UNUSABLE = (
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "cache_implementation",
    "past_key_values",
)
"""Options of `generate` that bring or need a cache of their own."""
HANDOVER_OPTIONS = (
    "inputs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "streamer",
    "stopping_criteria",
)
"""Options of `generate` that the hand-over sets."""


def generate(
    model: HFModel,
    prefill: Prefill,
    options: Mapping[str, Any],
    streamer: Streamer | None = None,
    stopping: Sequence[StoppingCriteria] = (),
    seed: int | None = None,
) -> list[list[int]]:
    """New token ids per returned sequence. options: those of transformers' `generate`; the prefill is used up.

    What other threads generate on the model at the same time is computed together with it, see `decode.py`. The same
    seed draws the same numbers, whatever runs beside it. Stop strings, those of a generation config too, count in what
    is new alone.
    """
    _refuse(options)
    ids = torch.tensor([list(prefill.token_ids)], device=model.device)
    criteria, full = _complete(model, options)
    with model.batcher.member(*sharing(model, prefill)) as member, seeded(seed):
        face = _face(model.model, _Answers(model, prefill, member))
        out = face.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([*stopping, *criteria]),
            past_key_values=prefill.state if _goes_on(model, prefill, options) else _lacking_one(prefill.cache),
            **_gapped(model, prefill),
            **full,
        )
    sequences = out if isinstance(out, Tensor) else out.sequences
    rows: list[list[int]] = sequences[:, ids.shape[1] :].tolist()
    return rows


def _refuse(options: Mapping[str, Any]) -> None:
    """SettingsError for what would bypass the prefilled cache, in the options or in their `generation_config`."""
    config = options.get("generation_config")
    given = {**(vars(config) if config is not None else {}), **options}
    for name in UNUSABLE:
        if given.get(name) is not None:
            raise SettingsError(f"generate's option '{name}' needs a cache of its own; leave it out.")
    if options.get("token_healing"):
        raise SettingsError(
            "generate's option 'token_healing' takes back the prompt's last token, which is computed already; leave it "
            "out."
        )
    if given.get("use_cache") is False:
        raise SettingsError("generate's option 'use_cache' is False, but the prompt lies in a cache; leave it out.")
    for name in HANDOVER_OPTIONS:
        if options.get(name) is not None:
            raise SettingsError(f"generate's option '{name}' is set by the prompt that was prefilled; leave it out.")


def _goes_on(model: HFModel, prefill: Prefill, options: Mapping[str, Any]) -> bool:
    """Whether an answer goes on from the prompt's state; several at once compute the prompt, each for itself."""
    several = (told(name, options, model) for name in ("num_beams", "num_return_sequences"))
    return prefill.state is not None and all(int(number or 1) == 1 for number in several)


def _lacking_one(cache: RowCache | None) -> RowCache | None:
    """The cache without the last row of its prompt; None where a model's state is no KV per token."""
    if cache is not None:
        cache.length -= 1
    return cache


def sharing(model: HFModel, prefill: Prefill) -> tuple[RowCache | None, Wiring | None]:
    """How a request takes part in shared steps: its cache, and the wiring where attention of ours is taken.

    No cache: not at all. Some rotations go by the longest of all prompts, some layers hold a state that is not KV, and
    biases by position are one prompt's own.
    """
    wiring = model.wiring
    if wiring is not None and wiring.biases_at(prefill.positions) is not None:
        return None, None
    if wiring is not None:
        takes_ours = wiring.mode == "rows" and "position_ids" in wiring.options
        return prefill.cache, wiring if takes_ours else None
    try:
        probe.refuse_by_config(model.model.config.get_text_config())
    except RefusedError:
        return None, None
    return prefill.cache, None


def _gapped(model: HFModel, prefill: Prefill) -> dict[str, Tensor]:
    """The positions int64 [1, T] of a prompt that leaves some free; nothing where `generate` counts right by itself."""
    if prefill.positions is None or not probe.takes_positions(model.model):
        return {}
    return {"position_ids": prefill.positions[None].to(model.device)}


def told(name: str, options: Mapping[str, Any], model: HFModel) -> Any:
    """An option of `generate`: given itself, in a generation config, or the model's own."""
    configs = (options.get("generation_config"), model.model.generation_config)
    found = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in found if value is not None), None)


def stop_strings_of(options: Mapping[str, Any], model: HFModel) -> tuple[str, ...]:
    """The stop strings that options, their generation config or the model's own name."""
    found = told("stop_strings", options, model) or ()
    return (found,) if isinstance(found, str) else tuple(found)


def _complete(model: HFModel, options: Mapping[str, Any]) -> tuple[list[StoppingCriteria], dict[str, Any]]:
    """Options with what `generate` cannot know: a padding id, our cache. Stop strings become what stops at them.

    transformers' own would look at the end of the prompt, too, and does not take every tokenizer. Token healing takes
    the prompt's last token back, whose KV is computed already: a model that asks for it goes without.
    """
    full = {**options, "use_cache": True, "cache_implementation": None, "stop_strings": None, "token_healing": False}
    criteria, stops = list[StoppingCriteria](), stop_strings_of(options, model)
    if stops:
        reorders = int(told("num_beams", options, model) or 1) > 1
        criteria.append(StopWhere(lambda: UntilStop(Spelling.over(model.tokenizer, stops), stops), reorders))
    if told("token_healing", options, model):
        _tell_of_healing(model.name)
    config = model.model.generation_config
    if config.pad_token_id is None and "pad_token_id" not in full:
        end = config.eos_token_id
        full["pad_token_id"] = end[0] if isinstance(end, list) else (end if end is not None else 0)
    return criteria, full


@functools.cache
def _tell_of_healing(name: str) -> None:
    """Once for each model."""
    log.warning(
        "The generation config of %s wants token_healing; answers are written without it: it takes back the prompt's "
        "last token, which is computed already. Set token_healing to false there to hear no more of it.",
        name,
    )


def _face(model: PreTrainedModel, answers: _Answers) -> Any:
    """The model under another forward: a shallow copy, which has the same modules, weights and configurations."""
    face = copy.copy(model)

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return answers.forward(args, kwargs)

    face.__dict__["forward"] = forward
    face.__dict__["_optimize_model_for_decode"] = nullcontext  # it changes what all share: each step does it for itself
    return face


class _Answers:
    """What one `generate` gets for its model's forwards: first the prefill's logits, then steps."""

    def __init__(self, model: HFModel, prefill: Prefill, member: Member | None) -> None:
        self._model, self._prefill, self._member = model, prefill, member
        self._forward, self._batcher = model.model.forward, model.batcher
        self._is_first = prefill.cache is not None

    def forward(self, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        """The model's output."""
        cache = self._prefill.cache
        if args or arguments.get("past_key_values") is not cache:  # a logits processor that asks the model something
            return self._batcher.step(None, functools.partial(self._forward, *args), arguments)
        if cache is not None and self._is_first:
            self._is_first = False
            repeats = arguments["input_ids"].shape[0]
            if repeats > 1:
                cache.batch_repeat_interleave(repeats)
            if not arguments.get("output_hidden_states") and not arguments.get("output_attentions"):
                cache.length += 1
                logits = self._prefill.logits.expand(repeats, 1, -1)
                return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        behind = self._model.standing(self._prefill, arguments["input_ids"].shape[1])
        return self._batcher.step(self._member, behind(self._forward), arguments)
