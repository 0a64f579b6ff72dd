"""Reuse prefixes by copies of the model's own cache, for models whose state is not KV per token.

A linear-attention, Mamba or convolution layer has one state for all tokens so far, which cannot be
split. So the model's whole cache is copied before a prompt's last token, and at the point where two
prompts diverge. A later prompt with the same prefix continues from the copy, and the result is
exact. A test on the model's real weights shows whether the model can continue from a copy.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ragfuse.hf import probe
from ragfuse.hf.cache import CACHE

Kind = Literal["", "run", "whole"]
"""How a model can continue from a copy of its cache.

"": no copies are made, for models with KV per token and for encoder-decoders. "run": one forward
pass over the tokens after the copy gives the same result as one pass over all tokens. "whole": the
two results differ, so every prompt is computed from its first token.
"""
MAX_KEPT = 256
"""Maximum number of kept caches, because a new prompt is compared with every kept cache."""
_PROBED = 48
_CUTS = (_PROBED - 1, _PROBED - 2, _PROBED - 7, _PROBED // 2)
"""Where the probed prompt is cut; a lost state shows in the first tokens after a cut."""

Ids = np.ndarray[Any, np.dtype[np.int64]]


class States:
    """The kept caches of one engine (one model and tenant), with LRU eviction. Thread-safe.

    Args:
        nbytes: Maximum total bytes of all kept caches.
        min_tokens: Minimum length of a prefix whose cache is kept, in tokens.
    """

    def __init__(self, nbytes: int, min_tokens: int = 1) -> None:
        self.min_tokens = min_tokens
        self._lock = threading.Lock()
        # each key is a prefix: its token ids, 8 bytes each
        self._kept: LRUCache[bytes, Any] = LRUCache(
            nbytes, getsizeof=lambda cache: sum(each.nbytes for each in tensors(cache))
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all kept caches."""
        with self._lock:
            return int(self._kept.currsize)

    def longest_prefix(self, token_ids: Sequence[int]) -> tuple[Any, int, int]:
        """Find the kept cache of the longest prefix of a prompt.

        Returns:
            The kept cache (None if no prefix is kept) with its number of tokens, and the length in
            tokens of the longest prefix that the prompt shares with a kept prompt. Continue only
            from a copy of the cache.
        """
        ids, n_kept, n_shared, longest = _array(token_ids), 0, 0, b""
        with self._lock:
            for key in self._kept:
                kept = np.frombuffer(key, np.int64)
                n = _n_shared(kept, ids)
                n_shared = max(n_shared, n)
                if n_kept < n == len(kept):
                    n_kept, longest = n, key
            return self._kept[longest] if n_kept else None, n_kept, n_shared

    def keep(self, token_ids: Sequence[int], cache: Any) -> None:
        """Keep a copy of the cache of these tokens, if `min_tokens` and `nbytes` allow it."""
        if len(token_ids) < self.min_tokens:
            return
        kept = copied(cache)
        with self._lock:
            with suppress(ValueError):  # larger than the whole capacity
                self._kept[_array(token_ids).tobytes()] = kept
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem()

    def forget(self, is_doomed: Callable[[Any], bool]) -> None:
        """Drop all kept caches whose token ids `is_doomed` accepts."""
        with self._lock:
            for key in [key for key in self._kept if is_doomed(np.frombuffer(key, np.int64))]:
                del self._kept[key]

    def clear(self) -> None:
        """Drop all kept caches."""
        with self._lock:
            self._kept.clear()


def begin(
    model: PreTrainedModel, token_ids: Sequence[int], kind: Kind, states: States | None
) -> tuple[Any, int]:
    """Compute the cache of all prompt tokens but the last, continuing a kept cache if possible.

    A copy of the result is kept. A second copy is kept at the point where the prompt diverges from
    an earlier prompt.

    Args:
        model: The model.
        token_ids: The tokens of the prompt.
        kind: How the model can continue from a copy.
        states: The kept caches. None means that no cache is looked up or kept.

    Returns:
        The cache, and the number of tokens reused from a kept cache. The cache is None if the
        prompt must be computed in one forward pass.
    """
    end = len(token_ids) - 1
    if kind == "whole" or end < 1:
        return None, 0
    kept, n_before, n_shared = (
        (None, 0, 0) if states is None else states.longest_prefix(token_ids[:-1])
    )
    cache = copied(kept)
    at, ids = n_before, torch.tensor([list(token_ids)], device=probe.device_of(model))
    parts = states is not None and n_shared - at >= states.min_tokens and n_shared < end
    for stop in (n_shared, end) if parts else (end,):
        if stop > at:
            cache = getattr(probe.run_forward(model, ids[:, at:stop], cache, at), CACHE)
            if states is not None:
                states.keep(token_ids[:stop], cache)
        at = stop
    return cache, n_before


def copied(cache: Any) -> Any:
    """Return a deep copy of a cache."""
    with torch.no_grad():
        return copy.deepcopy(cache)


def kind_of(model: PreTrainedModel, n_layers: int) -> Kind:
    """Test how a model can continue from a copy of its cache.

    After continuing, every tensor of the cache and the next logits must equal the result of one
    forward pass over all tokens, within rounding.
    """
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return ""
    ids = probe.probe_tokens(config.vocab_size, _PROBED, probe.device_of(model))
    bound = probe.tolerance_of(model.dtype, n_layers)
    try:
        whole = probe.run_forward(model, ids, None, 0)
        if probe.is_whole(getattr(whole, CACHE, None), n_layers, _PROBED):
            return ""
        kept = list(tensors(getattr(whole, CACHE)))
        if not kept or _answer_error(model, ids, whole) > bound:
            return "whole"
        same = [_error(model, ids, cut, whole) <= bound for cut in _CUTS]
    except probe.UNFIT:
        return "whole"
    return "run" if all(same) else "whole"


def _answer_error(model: PreTrainedModel, ids: Tensor, whole: Any) -> float:
    """Return the error of the first logits that `generate` computes from a copied cache."""
    before = getattr(probe.run_forward(model, ids[:, :-1], None, 0), CACHE)
    out: Any = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=1,
        output_logits=True,
        return_dict_in_generate=True,
        **{CACHE: copied(before)},
    )
    return probe.logits_error(out.logits[0][0], whole.logits[0, -1])


def _error(model: PreTrainedModel, ids: Tensor, cut: int, whole: Any) -> float:
    """Continue a copied cache with the ids from `cut` on; return the error of cache and logits."""
    before = copied(getattr(probe.run_forward(model, ids[:, :cut], None, 0), CACHE))
    found = probe.run_forward(model, ids[:, cut:], before, cut)
    caches = (tensors(getattr(out, CACHE)) for out in (found, whole))
    pairs = list(zip(*caches, strict=True))
    errors = [probe.relative(*pair) for pair in pairs if pair[0].is_floating_point()]
    return max(probe.logits_error(found.logits[0, -1], whole.logits[0, -1]), *errors)


def _array(token_ids: Sequence[int]) -> Ids:
    return np.asarray(token_ids, dtype=np.int64)


def _n_shared(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def tensors(value: object) -> Iterator[Tensor]:
    """Yield all tensors of a cache in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)
    elif type(value).__module__.startswith("transformers") and not isinstance(
        value, nn.Module | PreTrainedConfig
    ):
        yield from tensors(getattr(value, "__dict__", {}))
