"""Checks on a model's real weights that fused prefill is correct, each error against a bound that rounding explains.

The reference of every check is the model's own forward: chunks are encoded alone at their positions in the prompt, and
missing parts are computed over the KV before them. So rotation, selection, masks and buffers are all tested. Speed and
the quality of answers are not measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ragfuse.fuse.fusor import CachedRun
from ragfuse.fuse.rope import shifted
from ragfuse.fuse.select import policy_named
from ragfuse.hf.model import HFModel, KVSource, Prefill
from ragfuse.hf.probe import (
    DELTA,
    bound_of,
    is_routed,
    last_logits,
    logits_error,
    plain_kv,
    probe_tokens,
    relative,
    takes_positions,
    typical,
)
from ragfuse.types.kv import ChunkKV, LayerKV

PART_TOKENS = (9, 41, 34, 47, 12)
"""Tokens of the parts of the test prompt: an exact prefix, three chunks, a question."""
Progress = Callable[[str], object]
"""A callback that receives the name of each finished check."""
NO_NUMBER = 1e9
"""The error reported for an infinite or NaN result."""


@dataclass(frozen=True)
class Check:
    """The result of one check: the largest relative error measured, and the largest that rounding explains."""

    name: str
    error: float
    bound: float
    passed: bool


@dataclass(frozen=True)
class Verdict:
    """All checks of one model; a refused model has one failed check, named by the reason."""

    model: str
    passed: bool
    checks: tuple[Check, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        return {"model": self.model, "passed": self.passed, "checks": [asdict(check) for check in self.checks]}


@dataclass(frozen=True)
class PromptPart:
    """A part of the test prompt: reused from `kv`, with rows recomputed if `blend`, or computed if `kv` is None."""

    ids: tuple[int, ...]
    kv: ChunkKV | None = None
    blend: bool = True


@dataclass(frozen=True)
class PrefillState:
    """The result of a prefill: logits [V] of the last row and the KV of all rows, by layer."""

    logits: Tensor
    layers: tuple[LayerKV, ...]

    def until(self, row: int) -> PrefillState:
        """Return the rows before `row`, without logits to compare."""
        cut = (LayerKV(kv.keys[:, :row], kv.values[:, :row]) for kv in self.layers)
        return PrefillState(torch.ones(1), tuple(cut))

    def of(self, rows: Tensor, first_layer: int) -> PrefillState:
        """Return the given rows of layers `first_layer` and later, without logits to compare."""
        cut = (LayerKV(kv.keys[:, rows], kv.values[:, rows]) for kv in self.layers[first_layer:])
        return PrefillState(torch.ones(1), tuple(cut))

    def error(self, wanted: PrefillState, routed: bool = False) -> float:
        """Return the largest relative error among the logits and each layer's keys and values.

        If `routed`, it is the largest median error over rows of keys and values, and logits are not compared.
        """
        pairs = [
            (getattr(a, part), getattr(b, part))
            for a, b in zip(self.layers, wanted.layers, strict=True)
            for part in ("keys", "values")
        ]
        if routed:
            return _worst([typical(found, right) for found, right in pairs])
        logits = logits_error(self.logits, wanted.logits)
        return _worst([logits, *(relative(found, right) for found, right in pairs)])


def verify(
    model: HFModel, policy: str = "hkvd", ratio: float = 0.15, progress: Progress = lambda check: None
) -> Verdict:
    """Run all checks of fused prefill on a model.

    Args:
        model: The model; its lock is held all the time.
        policy: Name of the selection policy.
        ratio: Recompute ratio, 0..1.
        progress: Called with the name of each finished check.
    """
    if model.profile.refusal:
        return Verdict(model.name, False, (Check(model.profile.refusal, 1.0, 0.0, False),))
    with model.lock:
        checks = tuple(_with_progress(_Checks(model, policy, ratio).run(), progress))
    return Verdict(model.name, all(check.passed for check in checks), checks)


def _with_progress(checks: Iterator[Check], progress: Progress) -> Iterator[Check]:
    for check in checks:
        progress(check.name)
        yield check


class _Checks:
    """The checks of one model, over chunks that are encoded once."""

    def __init__(self, model: HFModel, policy: str, ratio: float) -> None:
        self.model, self.policy, self.ratio = model, policy, ratio
        vocab = model.model.config.get_text_config().vocab_size
        self._vocab = vocab
        self._routed = is_routed(model.model.config.get_text_config(), model.dtype)
        self._placed: dict[tuple[tuple[int, ...], int], tuple[LayerKV, ...]] = {}
        ids = probe_tokens(vocab, sum(PART_TOKENS), model.device)[0].tolist()
        bounds = [sum(PART_TOKENS[:index]) for index in range(len(PART_TOKENS) + 1)]
        runs = [tuple(ids[lo:hi]) for lo, hi in pairwise(bounds)]
        self.prefix = PromptPart(runs[0], model.encode(runs[0]), blend=False)
        self.chunks = [PromptPart(run, model.encode(run)) for run in runs[1:-1]]
        self.question = PromptPart(runs[-1])
        self.parts = [self.prefix, *self.chunks, self.question]

    def run(self) -> Iterator[Check]:
        stored = [part.kv for part in self.parts if part.kv is not None]
        before = [[(layer.keys.clone(), layer.values.clone()) for layer in kv.layers] for kv in stored]
        yield self._check("rotation round trip", self._rotation())
        yield self._check("ratio 1 equals full prefill", self._ratio_one(self.parts))
        yield self._check("ratio 0 equals reuse", self._reuse(self.parts))
        yield self._check("fully cached prompt", self._reuse(self.parts[:-1]))
        a, b, c = self.chunks
        yield self._check("same chunk twice", self._reuse([self.prefix, a, b, a, self.question]))
        yield self._check("chunk order permuted", self._reuse([self.prefix, c, a, b, self.question]))
        yield self._check("misses in any pattern", self._misses())
        yield self._check("a later token never changes an earlier row", self._causality())
        yield self._check(f"{self.policy} at {self.ratio:g} leaves the other rows as stored", self._untouched())
        windows = [window for window in self.model.profile.windows if window]
        if windows:
            parts = self._longer_than(max(windows))
            error = _worst([self._ratio_one(parts), self._reuse(parts)])
            yield self._check("prompt longer than the sliding window", error, sum(len(part.ids) for part in parts))
        same = [
            torch.equal(k, now.keys) and torch.equal(v, now.values)
            for kv, old in zip(stored, before, strict=True)
            for now, (k, v) in zip(kv.layers, old, strict=True)
        ]
        yield Check("stored tensors are never changed", float(not all(same)), 0.0, all(same))

    def _check(self, name: str, error: float, n_tokens: int = sum(PART_TOKENS)) -> Check:
        bound = bound_of(self.model.dtype, self.model.n_layers, n_tokens)
        return Check(name, error, bound, error <= bound)

    def _rotation(self) -> float:
        """Compare keys that we rotated with keys that the model rotated, and rotate them back."""
        ids, errors = self.chunks[0].ids, []
        near, far = self.model.encode(ids).layers, self._alone(ids, DELTA)
        for layout, kv, wanted in zip(self.model.profile.rope, near, far, strict=True):
            for name in ("keys", "values"):
                rotation = layout if layout is not None and layout.part == name else None
                rotated = shifted(getattr(kv, name), DELTA, rotation)
                errors.append((typical if self._routed else relative)(rotated, getattr(wanted, name)))
                errors.append(relative(shifted(rotated, -DELTA, rotation), getattr(kv, name)))
        return _worst(errors)

    def _ratio_one(self, parts: Sequence[PromptPart]) -> float:
        ids = [token for part in parts for token in part.ids]
        policy = "full" if self.policy == "none" else self.policy
        return self._fused(parts, policy, 1.0).error(_state(self.model.full_prefill(ids)), self._routed)

    def _reuse(self, parts: Sequence[PromptPart]) -> float:
        return self._fused(parts, "none", 0.0).error(self._by_hand(parts), self._routed)

    def _misses(self) -> float:
        """Try every combination of missing parts, the prefix included."""
        errors = []
        for here in product((True, False), repeat=len(self.parts) - 1):
            parts = [part if has else PromptPart(part.ids) for part, has in zip(self.parts, here, strict=False)]
            errors.append(self._reuse([*parts, self.question]))
        return _worst(errors)

    def _causality(self) -> float:
        """Change a token inside the last chunk at ratio 1, and the last token at the policy's ratio."""
        errors, last = [], self.chunks[-1]
        middle = len(last.ids) // 2
        ids = (*last.ids[:middle], last.ids[middle] ^ 1, *last.ids[middle + 1 :])
        changed = [*self.parts[:-2], PromptPart(ids, self.model.encode(ids)), self.question]
        row = sum(PART_TOKENS[:-2]) + middle
        one, other = (self._fused(parts, self.policy, 1.0) for parts in (self.parts, changed))
        errors.append(one.until(row).error(other.until(row), self._routed))
        if policy_named(self.policy).wants == "nothing":
            ids = (*self.question.ids[:-1], self.question.ids[-1] ^ 1)
            changed = [*self.parts[:-1], PromptPart(ids)]
            row = sum(PART_TOKENS) - 1
            one, other = (self._fused(parts, self.policy, self.ratio) for parts in (self.parts, changed))
            errors.append(one.until(row).error(other.until(row), self._routed))
        return _worst(errors)

    def _untouched(self) -> float:
        """Compare the candidates that were not chosen with the cached KV, from the check layer on."""
        prefill = self._prefill(self.parts, self.policy, self.ratio)
        is_reused = torch.ones(sum(PART_TOKENS), dtype=torch.bool)
        is_reused[sum(PART_TOKENS[:-1]) :] = False
        is_reused[prefill.chosen.cpu()] = False
        rows = is_reused.nonzero()[:, 0].to(self.model.device)
        first = policy_named(self.policy).check_layer
        return _state(prefill).of(rows, first).error(self._by_hand(self.parts).of(rows, first), self._routed)

    def _longer_than(self, window: int) -> list[PromptPart]:
        """Return a prompt of a prefix, two chunks and a question that is longer than a sliding window."""
        total = window + sum(PART_TOKENS)
        ids = probe_tokens(self._vocab, total, self.model.device)[0].tolist()
        size = (total - PART_TOKENS[0] - PART_TOKENS[-1]) // 2
        cuts = [0, PART_TOKENS[0], PART_TOKENS[0] + size, total - PART_TOKENS[-1], total]
        runs = [tuple(ids[lo:hi]) for lo, hi in pairwise(cuts)]
        cached = [PromptPart(run, self.model.encode(run), blend=index > 0) for index, run in enumerate(runs[:-1])]
        return [*cached, PromptPart(runs[-1])]

    def _alone(self, ids: tuple[int, ...], start: int) -> tuple[LayerKV, ...]:
        """Return the KV of a run without context, computed by the model itself at positions from `start` on."""
        if (ids, start) not in self._placed:
            positions = torch.arange(start, start + len(ids), device=self.model.device)
            tokens = torch.tensor([ids], device=self.model.device)
            self._placed[ids, start] = plain_kv(self.model.model, tokens, positions)
        return self._placed[ids, start]

    def _fused(self, parts: Sequence[PromptPart], policy: str, ratio: float) -> PrefillState:
        return _state(self._prefill(parts, policy, ratio))

    def _prefill(self, parts: Sequence[PromptPart], policy: str, ratio: float) -> Prefill:
        ids, lo = [token for part in parts for token in part.ids], 0
        runs: list[CachedRun] = []
        chunks: list[ChunkKV] = []
        for part in parts:
            if part.kv is not None:
                runs.append(CachedRun(len(chunks), lo, lo + len(part.ids), lo, part.blend))
                chunks.append(part.kv)
            lo += len(part.ids)
        return self.model.fuse(ids, torch.arange(lo), runs, KVSource(chunks), policy, ratio)

    def _by_hand(self, parts: Sequence[PromptPart]) -> PrefillState:
        """Build the reference: reuse or compute each part in order by the model's own forward; compute the last row."""
        last = parts[-1]
        if last.kv is not None:
            parts = [*parts[:-1], PromptPart(last.ids[:-1], last.kv), PromptPart(last.ids[-1:])]
        hf, cache, lo, logits = self.model.model, DynamicCache(), 0, torch.empty(0)
        for part in parts:
            ids = torch.tensor([part.ids], device=self.model.device)
            positions = torch.arange(lo, lo + len(part.ids), device=self.model.device)
            lo += len(part.ids)
            if part.kv is not None:
                for layer, kv in enumerate(self._alone(part.ids, int(positions[0]))):
                    cache.update(kv.keys[None], kv.values[None], layer)
                continue
            options = {"position_ids": positions[None]} if takes_positions(hf) else {}
            with torch.no_grad():
                out = hf(input_ids=ids, past_key_values=cache, use_cache=True, **last_logits(hf), **options)
            logits = out.logits[0, -1]
        return PrefillState(logits, tuple(LayerKV(layer.keys[0], layer.values[0]) for layer in cache.layers))


def _worst(errors: Sequence[float]) -> float:
    """Return the largest error; infinite and NaN count as `NO_NUMBER`."""
    return max(error if math.isfinite(error) else NO_NUMBER for error in errors)


def _state(prefill: Prefill) -> PrefillState:
    return PrefillState(prefill.logits, prefill.kv.layers)
