"""Checks on a model's real weights that fused prefill is correct, up to rounding.

The reference is the model's own forward, which encodes each chunk alone at the chunk's position in
the prompt, and computes missing parts over the preceding KV. So rotation, selection, masks and
buffers are all tested. Only the check of causality compares two fused prefills. Speed and answer
quality are not measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from transformers import DynamicCache

from ragfuse.fuse.fusor import PRIOR_ROWS
from ragfuse.fuse.select import policy_named
from ragfuse.hf.cache import RowCache
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.hf.prefill import PromptPart
from ragfuse.hf.probe import bound_of, plain_kv, run_forward

PART_TOKENS = (9, 41, 34, 47, 12)
"""Tokens in each part of the test prompt: an exact prefix, three chunks, a question."""
Progress = Callable[[str], object]
"""Called with the name of each finished check."""


@dataclass(frozen=True)
class Check:
    """The result of one check. A check passes if `error` is at most `bound` (`probe.bound_of`)."""

    name: str
    error: float
    bound: float
    passed: bool


@dataclass(frozen=True)
class Verdict:
    """All checks of one model. A refused model has one failed check, which names the reason."""

    model: str
    passed: bool
    checks: tuple[Check, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as plain JSON types."""
        return asdict(self)


def verify(
    model: HFModel,
    policy: str = "hkvd",
    ratio: float = 0.15,
    progress: Progress = lambda check: None,
) -> Verdict:
    """Run all checks of fused prefill on a model.

    Args:
        model: The model, whose lock is held during all checks.
        policy: Name of the selection policy.
        ratio: Recompute ratio, 0..1.
        progress: Called with the name of each finished check.
    """
    if model.profile.refusal:
        return Verdict(model.name, False, (Check(model.profile.refusal, 1.0, 0.0, False),))
    checks = list[Check]()
    with model.lock:
        for check in _Checks(model, policy, ratio).run():
            checks.append(check)
            progress(check.name)
    return Verdict(model.name, all(check.passed for check in checks), tuple(checks))


class _Checks:
    """The checks of one model. The chunks of the test prompt are encoded only once."""

    def __init__(self, model: HFModel, policy: str, ratio: float) -> None:
        self.model, self.policy, self.ratio = model, policy, ratio
        # cached: the model's own KV of tokens at positions from `first` on, without context
        self._alone = cache(
            lambda ids, first: plain_kv(
                model.model, torch.tensor([ids], device=model.device), first
            )
        )
        self.parts = model.probe_parts(PART_TOKENS)

    def run(self) -> Iterator[Check]:
        parts = prefix, a, _, c, question = self.parts
        yield self._check("ratio 1 equals full prefill", self._ratio_one(parts))
        yield self._check("ratio 0 equals reuse", self._reuse(parts))
        yield self._check("fully cached prompt", self._reuse(parts[:-1]))
        yield self._check("a chunk twice", self._reuse([prefix, c, a, c, question]))
        yield self._check("misses in any pattern", self._misses())
        yield self._check("a later token never changes an earlier row", self._causality())
        yield self._check(f"{self.policy} at {self.ratio:g} keeps the other rows", self._kept())
        windows = [window for window in self.model.profile.windows if window]
        if windows:
            size = (max(windows) + sum(PART_TOKENS) - PART_TOKENS[0] - PART_TOKENS[-1]) // 2
            parts = self.model.probe_parts((PART_TOKENS[0], size, size, PART_TOKENS[-1]))
            error = max(self._ratio_one(parts), self._reuse(parts))
            yield self._check(
                "prompt longer than the sliding window", error, sum(len(part.ids) for part in parts)
            )

    def _check(self, name: str, error: float, n_tokens: int = sum(PART_TOKENS)) -> Check:
        bound = bound_of(self.model.dtype, self.model.n_layers, n_tokens)
        return Check(name, error, bound, error <= bound)

    def _ratio_one(self, parts: Sequence[PromptPart]) -> float:
        return self.model.error_of(parts, "full" if self.policy == "none" else self.policy, 1.0)

    def _reuse(self, parts: Sequence[PromptPart]) -> float:
        fused = self.model.fuse_parts(parts, "none", 0.0)
        return fused.error(self._by_hand(parts), self.model.is_routed)

    def _misses(self) -> float:
        """Return the largest error over all sets of parts (prefix, chunks) without cached KV."""
        errors = []
        for here in product((True, False), repeat=len(self.parts) - 1):
            parts = [
                part if has else PromptPart(part.ids)
                for part, has in zip(self.parts, here, strict=False)
            ]
            errors.append(self._reuse([*parts, self.parts[-1]]))
        return max(errors)

    def _causality(self) -> float:
        """Return the error of earlier rows when the last token is changed.

        If the policy depends on the question, the ratio is 1, because a changed question may lead
        to a different choice of rows.
        """
        ratio = self.ratio if policy_named(self.policy).wants == "nothing" else 1.0
        *before, last = self.parts[-1].ids
        changed = [*self.parts[:-1], PromptPart((*before, last ^ 1))]
        one, other = (
            self.model.fuse_parts(parts, self.policy, ratio) for parts in (self.parts, changed)
        )
        return one.error(other, self.model.is_routed, slice(sum(PART_TOKENS) - 1))

    def _kept(self) -> float:
        """Return the error of rows that were not recomputed. The reference is their cached KV plus
        a shift: the sum of the changes of the chunk's n recomputed rows / (n + `PRIOR_ROWS`).
        """
        prefill = self.model.fuse_parts(self.parts, self.policy, self.ratio)
        wanted, policy, lo = self._by_hand(self.parts), policy_named(self.policy), 0
        is_chosen = torch.zeros(sum(PART_TOKENS), dtype=torch.bool)
        is_chosen[prefill.chosen.cpu()] = True
        for part in self.parts:
            hi = lo + len(part.ids)
            rows = torch.arange(lo, hi)[is_chosen[lo:hi]].to(self.model.device)
            if part.kv is None:
                is_chosen[lo:hi] = True
            elif len(rows):
                for new, old in zip(prefill.kv.layers, wanted.kv.layers, strict=True):
                    for fresh, cached in ((new.keys, old.keys), (new.values, old.values)):
                        change = (fresh[:, rows] - cached[:, rows]).sum(1, keepdim=True)
                        cached[:, lo:hi] += change / (len(rows) + PRIOR_ROWS)
            lo = hi
        rows = (~is_chosen).nonzero()[:, 0].to(self.model.device)
        first = policy.check_layer
        layers = slice(first, first + 1 if first else None)
        return prefill.error(wanted, self.model.is_routed, rows, layers)

    def _by_hand(self, parts: Sequence[PromptPart]) -> Prefill:
        """Compute the reference, part by part, with the model's own forward."""
        last = parts[-1]
        if last.kv is not None:
            parts = [*parts[:-1], PromptPart(last.ids[:-1], last.kv), PromptPart(last.ids[-1:])]
        known, ids, logits = DynamicCache(), list[int](), torch.empty(0)
        for part in parts:
            if part.kv is None:
                new = torch.tensor([part.ids], device=self.model.device)
                logits = run_forward(self.model.model, new, known, len(ids)).logits[0, -1]
            else:
                for layer, kv in enumerate(self._alone(part.ids, len(ids))):
                    known.update(kv.keys[None], kv.values[None], layer)
            ids += part.ids
        rows = RowCache(self.model.n_layers)
        rows.adopt(known)
        return Prefill(tuple(ids), rows, logits)
