"""Time one model on this machine: full prefill, fused prefill, codecs and tiers.

The result is a `MachineProfile`, which the engine stores and `ragfuse.plan` uses to predict prefills.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from ragfuse.codec import Codec
from ragfuse.errors import ModelError, StoreError
from ragfuse.hf.model import HFModel
from ragfuse.measure.fit import fitted_fused, fitted_prefill
from ragfuse.measure.medians import Progress
from ragfuse.measure.passes import decoding, fused_points, prefill_points
from ragfuse.measure.tiers import speed_of
from ragfuse.store import Tier
from ragfuse.types.profiles import MachineProfile

__all__ = ["MAX_TIMED_TOKENS", "Progress", "measure"]

log = logging.getLogger("ragfuse.measure")

MAX_TIMED_TOKENS = 3072
"""Tokens of the longest prompt that is timed, unless the model's context is shorter."""


def measure(
    model: HFModel,
    tiers: Sequence[Tier],
    progress: Progress = lambda what, done: None,
    longest: int = MAX_TIMED_TOKENS,
    rounds: int = 3,
    cool: Callable[[], object] | None = None,
    codecs: Callable[[str], Codec | None] = lambda level: None,
) -> MachineProfile:
    """Time a model on this machine. Takes minutes at most.

    Every figure is the median of interleaved rounds after a warm-up. A tier that does not store what is written to it
    is left out with a warning.

    Args:
        model: The model.
        tiers: The tiers to time.
        progress: Called as the timings proceed.
        longest: Tokens of the longest prompt to time.
        rounds: Rounds of each timing.
        cool: Called before each read of a tier, to empty caches so that the read is cold. Disk tiers do not need it.
        codecs: Returns the codec of a level, or None; decoding is timed for levels with a codec.

    Raises:
        ModelError: The model's KV cannot be reused, so there is nothing to time.
    """
    if model.profile.refusal:
        raise ModelError(f"{model.name} cannot reuse stored KV, so there is nothing to time: {model.profile.refusal}")
    n_parts = 3 + len(tiers)

    def part(number: int) -> Progress:
        return lambda what, done: progress(what, (number + done) / n_parts)

    max_tokens = min(longest, model.max_context or longest)
    prefill = prefill_points(model, max_tokens, rounds, part(0))
    fused = fused_points(model, prefill[-1][0], rounds, part(1))
    decode, packed = decoding(model, codecs, rounds, part(2))
    speeds, sample = {}, model.encode([0])
    for index, tier in enumerate(tiers):
        try:
            speeds[tier.name] = speed_of(tier, sample, rounds, part(3 + index), cool, model.device)
        except StoreError as error:
            log.warning("Tier %s was not timed, so there are no timings of it: %s", tier.name, error)
    return MachineProfile(
        model=model.fingerprint,
        device=str(model.device),
        threads=torch.get_num_threads(),
        dtype=str(model.dtype).removeprefix("torch."),
        n_layers=model.n_layers,
        prefill=fitted_prefill(prefill),
        fused=fitted_fused(fused, model.n_layers),
        tiers=speeds,
        prefill_points=prefill,
        decode=decode,
        packed=packed,
    )
