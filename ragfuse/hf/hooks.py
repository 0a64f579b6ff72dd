"""Run a fused prefill through a model's own forward, by hooks, without code per model family.

A pre-hook on each decoder layer passes on only the rows to compute. The computed KV overwrites the
cached KV of these rows. Norms, projections, rotation and MLP are the model's own. In mode "dense",
attention is the model's own too. The last layer and `Policy.check_layer` (if above 0) run twice.
The first run stops once all current rows have keys and values. The second run computes fewer rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragfuse.fuse.attend import Ragged, RowMask, Watch, attend, attend_ragged
from ragfuse.fuse.fusor import Fusion
from ragfuse.hf.cache import RowCache
from ragfuse.hf.probe import run_forward
from ragfuse.types.plan import watched_layers

ATTENTION = "ragfuse"
WATCHED_ROWS = 256
"""Maximum number of question rows whose attention is measured; bounds memory."""


def attention_of_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RowMask | Ragged,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute attention by `fuse.attend`. transformers calls this as its attention function.

    Returns:
        The attention output [B, R, Hq, D], and None in place of attention weights.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_mask, Ragged):
        if key is not attention_mask.newest:
            raise KVTransformed
        return attend_ragged(query, attention_mask, scaling, sliding_window, softcap, s_aux), None
    done = attend(query, key, value, attention_mask, scaling, sliding_window, softcap, s_aux)
    if attention_mask.watch is not None and attention_mask.watch.ends:
        raise _Seen
    return done, None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention_of_rows)


class KVTransformed(Exception):
    """Raised if a model changes the cache's keys before attention, so steps cannot be shared."""


class _Captured(Exception):
    """Raised in a layer once K and V are computed, to end the layer. Carries K and V."""


class _Seen(Exception):
    """Raised to stop a prefill after the last watched layer."""


@dataclass(frozen=True)
class Wiring:
    """Where and how hooks are attached to one model.

    Args:
        model: The model.
        layers: The decoder layers of the model.
        windows: Sliding window of each layer in tokens, or None. Used for the mask in mode "dense".
        mode: In mode "rows", the model passes the mask to ragfuse's attention function. In mode
            "dense", the model computes attention itself. If the model makes a mask, for example
            with ALiBi, that mask is used instead of ragfuse's mask.
        pads: True if the last layer's output is expanded to one row for each token of the prompt.
    """

    model: PreTrainedModel
    layers: tuple[nn.Module, ...]
    windows: tuple[int | None, ...]
    mode: str
    pads: bool = False

    def attention(self) -> AbstractContextManager[None]:
        """Return a context manager that sets ragfuse's attention function if the mode is "rows"."""
        return nullcontext() if self.mode == "dense" else attending_by(self.model, ATTENTION)


class FusedPass:
    """Runs one fused prefill of one prompt; single use. Hooks are removed even after errors."""

    def __init__(self, wiring: Wiring, fusion: Fusion) -> None:
        self.wiring, self.fusion = wiring, fusion
        self.cache = RowCache(len(wiring.layers), receiver=self.take)
        self._capture = False
        self._done = False
        self._looks: tuple[Tensor, Tensor] | None = (
            None  # (1.0 at question rows and 0.0 elsewhere, summed attention to each row)
        )
        self._narrowed = dict[int, tuple[Any, Tensor, Any]]()

    def run(self, token_ids: Tensor) -> None:
        """Prefill the prompt int64 [1, T], and set `logits` to the last row's logits [V]."""
        with self._hooked():
            out = run_forward(self.wiring.model, token_ids, self.cache, self.fusion.positions)
        self.logits: Tensor = out.logits[0, -1]

    def look(self, token_ids: Tensor, question_rows: Tensor) -> Tensor | None:
        """Return the attention of the question to every row: float32 [T].

        The attention is summed over heads, question rows and `watched_layers`. The prefill stops
        after the last of these layers. In mode "dense", the result is None.

        Args:
            token_ids: int64 [1, T].
            question_rows: int64 [n], on the CPU: the rows of the question. The last `WATCHED_ROWS`
                computed question rows are used. If no question row is computed, the prompt's last
                row is used.
        """
        if self.wiring.mode != "rows":
            return None
        fusion, device = self.fusion, token_ids.device
        computed = question_rows[~fusion.candidates.cached[question_rows]]
        asks = torch.zeros(token_ids.shape[1])
        asks[computed[-WATCHED_ROWS:] if len(computed) else -1] = 1.0
        paid = torch.zeros(fusion.buffers.n_keys, device=device)
        self._looks = asks.to(device), paid
        try:
            self.run(token_ids)
        except _Seen:
            return paid[: token_ids.shape[1]]
        raise RuntimeError("A layer ran without calling ragfuse's attention function.")

    def take(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new KV [1, H, R, D] of the current rows; return the whole KV for attention."""
        if self._capture:
            raise _Captured(keys, values)
        if self._done:
            return self.fusion.buffers.get(layer)
        return self.fusion.write(layer, keys, values)

    def before_layer(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Narrow a decoder layer's inputs to the rows that the layer will compute."""
        fusion = self.fusion
        fusion.buffers.open(layer)
        names = _parameters(type(module))  # type: ignore[arg-type]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden = given.pop("hidden_states")
        if layer == 0:
            hidden = hidden.index_select(1, fusion.rows)
        if fusion.needs_check(layer):
            fusion.check(layer, *self._only_kv(layer, module, hidden, given))
        keep = fusion.choose(layer)
        hidden = hidden if keep is None else hidden.index_select(1, keep)
        if layer == len(self.wiring.layers) - 1 and len(fusion.rows) > 1:
            fusion.write(layer, *self._only_kv(layer, module, hidden, given))
            hidden = hidden.index_select(1, fusion.keep_last())
            self._done = True
        if self._looks is not None:
            self._watch(layer, *self._looks)
        return (hidden,), self._arguments(layer, hidden.dtype, given)

    def _watch(self, layer: int, asks: Tensor, paid: Tensor) -> None:
        """In a watched layer, add to `paid` the attention of question rows, or of the only row."""
        mask, watched = self.fusion.mask(), watched_layers(len(self.wiring.layers))
        if layer not in watched:
            return
        if mask.watch is None:
            n_rows = len(mask.rows)
            weight = asks.index_select(0, mask.rows) if n_rows > 1 else asks.new_ones(1)
            weight[n_rows - self.fusion.n_padding :] = 0.0
            mask.watch = Watch(weight, paid)
        mask.watch.ends = layer == watched[-1]

    def _arguments(
        self, layer: int, dtype: torch.dtype, inputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        rows, mask = self.fusion.rows, self.fusion.mask()
        changed = {name: self._rows_of(inputs[name], rows) for name in _PER_ROW if name in inputs}
        if self.wiring.mode == "rows":
            changed["attention_mask"] = mask
        else:
            given = inputs.get("attention_mask")
            if isinstance(given, Tensor) and given.ndim == 4:
                changed["attention_mask"] = given.index_select(2, rows)
            else:
                changed["attention_mask"] = mask.dense(dtype, self.wiring.windows[layer])
        return {**inputs, **changed}

    def _rows_of(self, value: Any, rows: Tensor) -> Any:
        """Narrow an argument to the given rows, once for all layers that get this argument."""
        known, its_rows, narrowed = self._narrowed.get(id(value), (None, None, None))
        if known is not value or its_rows is not rows:
            narrowed = _rows_of(value, rows)
            self._narrowed[id(value)] = value, rows, narrowed
        return narrowed

    def _only_kv(
        self, layer: int, module: nn.Module, hidden: Tensor, given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        self._capture = True
        try:
            module.forward(hidden, **self._arguments(layer, hidden.dtype, given))
        except _Captured as captured:
            keys, values = captured.args
            return keys, values
        finally:
            self._capture = False
        raise RuntimeError(f"Layer {layer} ran without updating its KV cache.")

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        with self.wiring.attention(), ExitStack() as hooked:
            for index, layer in enumerate(self.wiring.layers):
                hook = partial(self.before_layer, index)
                hooked.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if self.wiring.pads:
                hooked.callback(self.wiring.layers[-1].register_forward_hook(self._padded).remove)
            yield

    def _padded(self, module: object, args: object, output: Any) -> Any:
        """Expand the last layer's output [1, R, d] to T rows by repeating the last row."""
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden[:, -1:].expand(-1, len(self.fusion.positions), -1)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


_PER_ROW = ("position_embeddings", "position_ids")


@cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the parameter names of a decoder layer's forward, "hidden_states" first."""
    return "hidden_states", *list(inspect.signature(kind.forward).parameters)[2:]


def _rows_of(value: Any, rows: Tensor) -> Any:
    """Narrow tensors [B, T, ...] to the given rows, including in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.index_select(1, rows)
    if isinstance(value, tuple | list):
        return type(value)(_rows_of(item, rows) for item in value)
    if isinstance(value, dict):
        return {name: _rows_of(item, rows) for name, item in value.items()}
    return value


@contextmanager
def attending(wiring: Wiring, ragged: Ragged) -> Iterator[None]:
    """Within the `with` block, let every layer attend to the KV in `ragged` (mode "rows" only)."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": ragged}

    with wiring.attention(), ExitStack() as hooked:
        for layer in wiring.layers:
            hooked.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield


@contextmanager
def attending_by(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch a model to a registered attention function within the `with` block."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
