"""ALiBi biases for prompts whose positions have gaps (Prompt Cache, section 4.2).

ALiBi models bias attention by the distance of a key, and take a key's index for its position. So the biases for all
positions are taken from the model's own forward, and looked up at the real positions; no model's formula is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragfuse.errors import InputError, ModelError
from ragfuse.hf.cache import RowCache

MASK = "attention_mask"
POSITION_STEP = 1024
"""The number of positions for which biases are computed is a multiple of this."""


class _LayerArguments(Exception):
    """The arguments of a model's first layer, carried out of its forward."""


class Biases:
    """The ALiBi biases of one model, by the name of the layers' argument that takes them.

    Hold the model's lock while using it.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
        self._model, self._layers = model, layers
        self._room, self._biases = 0, dict[str, Tensor]()

    def of(self, positions: Tensor) -> dict[str, Tensor]:
        """Return the biases [..., 1, K] for keys at given positions, by layer argument.

        Args:
            positions: int64 [K], increasing.

        Raises:
            InputError: They span more positions than the model supports.
        """
        last = int(positions[-1] - positions[0])
        if last >= self._room:
            room = (last // POSITION_STEP + 1) * POSITION_STEP
            self._biases, self._room = self._computed(room), room
        return {name: self._looked_up(made, positions[-1] - positions, last) for name, made in self._biases.items()}

    def _looked_up(self, made: Tensor, back: Tensor, last: int) -> Tensor:
        """Look biases up by the distance from the last key, so that near keys get the finest values in 16 bits.

        Some models make one bias per key, rising from 0; others make those of their longest context, rising to 0.
        """
        width = made.shape[-1]
        if last >= width:
            raise InputError(f"The prompt spans {last + 1} positions, and this model has {width}. Shorten the prompt.")
        if width == self._room:
            return made[..., :1] - made.index_select(-1, back)
        return made.index_select(-1, width - 1 - back)

    def _computed(self, room: int) -> dict[str, Tensor]:
        """Take the biases from a forward of one token after room - 1 others, stopped before the first layer."""
        cache = RowCache(len(self._layers))
        cache.length = room - 1
        handle = self._layers[0].register_forward_pre_hook(_raise_arguments, with_kwargs=True)
        try:
            token = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
            with torch.no_grad():
                self._model(input_ids=token, past_key_values=cache, use_cache=True)
        except _LayerArguments as handed:
            found = {name: value for name, value in handed.args[0].items() if _is_bias(name, value)}
        finally:
            handle.remove()
        if not found:
            raise ModelError(
                f"{self._model.config.model_type} passes no position biases to its layers, so it cannot compute "
                "prompts with gaps between positions, as prompts of a schema have. Use another model."
            )
        return found


def placed(arguments: Mapping[str, Any], biases: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the layer arguments that hold biases, with the given biases in them; masked keys stay masked."""
    changed = dict[str, Tensor]()
    for name, bias in biases.items():
        given = arguments.get(name)
        if not isinstance(given, Tensor) or not given.is_floating_point():
            continue
        if name == MASK:
            changed[name] = torch.where(given <= torch.finfo(given.dtype).min / 2, given, bias)
        else:
            changed[name] = bias.repeat(given.shape[0] // bias.shape[0], *(1,) * (bias.ndim - 1))
    return changed


def _raise_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _LayerArguments(kwargs)


def _is_bias(name: str, value: object) -> bool:
    """Whether a layer argument holds biases: floats per key that are not all equal."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or name == "hidden_states":
        return False
    return value.ndim > 2 and value.shape[-2] == 1 and not bool((value == value[..., :1]).all())
