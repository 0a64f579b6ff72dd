"""The methods of `ragfuse bench quality` by their names, and prefix caching, which calibration does
not measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import get_args

from ragfuse.calibration.case import Case
from ragfuse.calibration.methods import Encoded, Lab, Method, default_encoded
from ragfuse.errors import InputError, SettingsError
from ragfuse.fuse.fusor import CachedRun
from ragfuse.fuse.select import policy_named
from ragfuse.hf.model import HFModel, KVSource, Prefill
from ragfuse.types.plan import AUTO
from ragfuse.types.prompt import Prompt

RATIO_BY_NAME = MappingProxyType({"full": 1.0, "prefix": None, "none": 0.0})
"""Methods with a fixed ratio, or none."""


def methods_of(names: Sequence[str], ratios: Sequence[float], model: HFModel) -> list[Method]:
    """Return the methods of all names at all ratios, without repetitions.

    Args:
        names: Names as in `Method.name`; "auto" is `default_method`.
        ratios: Ratios for the policies that have a choice.
        model: The model, for "auto".

    Raises:
        SettingsError: A name is unknown.
    """
    found: list[Method] = []
    for name in names:
        policy, _, given = name.strip().partition("@")
        encoded = _checked_encoded(name, given or default_encoded(policy))
        if policy == AUTO:
            found.append(default_method(model))
        elif policy in RATIO_BY_NAME:
            found.append(Method(policy, RATIO_BY_NAME[policy], encoded))
        else:
            policy_named(policy)
            found += [Method(policy, ratio, encoded) for ratio in ratios]
    return list(dict.fromkeys(found))


def _checked_encoded(name: str, given: str) -> Encoded:
    for known in get_args(Encoded):
        if given == known:
            return known  # type: ignore[no-any-return]
    raise SettingsError(
        f"Method '{name}': after the @, wanted one of {', '.join(get_args(Encoded))}; found"
        f" '{given}'."
    )


def default_method(model: HFModel) -> Method:
    """Return the method that an engine uses by default for this model when all chunks are in the
    store.

    Results of `ragfuse calibrate`, which are kept in a store, are not considered.
    """
    return Method(*model.profile.default_choice)


class QualityLab(Lab):
    """A lab that measures prefix caching, too: KV up to the end of the first chunk is there
    before.
    """

    def hold(self, case: Case, methods: Sequence[Method]) -> None:
        """Ingest the case's chunks, and compute the KV of its prefix where that is a method."""
        super().hold(case, [method for method in methods if method.policy != "prefix"])
        if any(method.policy == "prefix" for method in methods):
            prompt = self.prompt(case)
            self._prefix_kv = self.model.encode(prompt.token_ids[: _n_prefix(prompt)])

    def prefill(self, method: Method, prompt: Prompt) -> Prefill:
        """Prefill the prompt with a method; call `hold` first."""
        if method.policy != "prefix":
            return super().prefill(method, prompt)
        runs = [CachedRun(0, 0, _n_prefix(prompt), 0, blend=False)]
        return self.model.fuse(
            prompt.token_ids, prompt.positions, runs, KVSource([self._prefix_kv]), "none", 0.0
        )


def _n_prefix(prompt: Prompt) -> int:
    chunks = [i for i, segment in enumerate(prompt.segments) if segment.kind == "chunk"]
    if not chunks:
        raise InputError(
            "Every chunk of the prompt has fewer tokens than the setting min_chunk_tokens, so that"
            " none is stored. Use longer chunks, or lower the setting."
        )
    return prompt.spans[chunks[0]][1]
