"""Time one model on this machine: full prefill, fused prefill, codecs and tiers.

The result is a `MachineProfile`, which the engine stores and `ragfuse.plan` uses to predict prefills.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ragfuse.codec import Codec
from ragfuse.errors import ModelError, StoreError
from ragfuse.hf.model import HFModel
from ragfuse.measure.codec_speed import decoding
from ragfuse.measure.fit import fitted_fused, fitted_prefill
from ragfuse.measure.passes import fused_points, prefill_points
from ragfuse.measure.tiers import speed_of
from ragfuse.store import Tier
from ragfuse.types.profiles import MachineProfile

__all__ = ["MAX_TIMED_TOKENS", "Progress", "measure"]

log = logging.getLogger("ragfuse.measure")

MAX_TIMED_TOKENS = 3072
"""Tokens of the longest prompt that is timed, unless the model's context is shorter."""
Progress = Callable[[str, float], object]
"""Called with a description of the current timing, and the share of all timings that is done (0 to 1)."""
_PREFILL, _FUSED, _DECODE = 0.3, 0.5, 0.05


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
    max_tokens = min(longest, model.max_context or longest)
    prefill = prefill_points(model, max_tokens, rounds, _part(progress, 0.0, _PREFILL))
    fused = fused_points(model, prefill[-1][0], rounds, _part(progress, _PREFILL, _FUSED))
    decode, packed = decoding(model, codecs, rounds, _part(progress, _PREFILL + _FUSED, _DECODE))
    done_share = _PREFILL + _FUSED + _DECODE
    speeds, share = {}, (1 - done_share) / max(1, len(tiers))
    sample = model.encode([0])
    for index, tier in enumerate(tiers):
        part = _part(progress, done_share + index * share, share)
        try:
            speeds[tier.name] = speed_of(tier, sample, rounds, part, cool, model.device)
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


def _part(progress: Progress, before: float, share: float) -> Progress:
    """Return a progress callback for a part that is `share` of the whole and begins when `before` is done."""

    def report(what: str, done: float) -> Any:
        return progress(what, before + share * done)

    return report
