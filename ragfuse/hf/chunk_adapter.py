"""The chunk adapter: a LoRA adapter that a model has while it encodes chunks after filler text,
and at no other time.

It changes what is stored of a chunk, so that a prompt that reuses the chunk comes closer to full
prefill. Questions, recomputed rows and full prefill are computed by the plain model, so full
prefill stays exactly what it was. It is read from PEFT's form; `ragfuse adapt` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragfuse.errors import ModelError
from ragfuse.hf.json_object import read_json_object
from ragfuse.types.keys import digest

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the name of a module."""
TRAIN_ANEW = "Train it anew with `ragfuse adapt`."


class ChunkAdapter:
    """Two low-rank matrices beside each of some linear layers.

    Args:
        pairs: The matrices (A [r, in], B [out, r]) of each adapted layer by the name of its module,
            in the dtype that the model computes in. B includes the adapter's scale.
    """

    def __init__(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self.pairs = dict(pairs)

    @cached_property
    def digest(self) -> str:
        """A digest of all weights, which is part of the model's fingerprint."""
        named = {
            f"{name}.{part}": matrix.detach().cpu().contiguous()
            for name, pair in self.pairs.items()
            for part, matrix in zip("AB", pair, strict=True)
        }
        return digest(save(named))

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Add the adapter to the layers of a model in this context. The caller holds the model's
        lock.
        """
        modules = dict(model.named_modules())
        hooks = [
            modules[name].register_forward_hook(partial(_added, down=down, up=up))
            for name, (down, up) in self.pairs.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _added(
    layer: nn.Module, args: tuple[Tensor, ...], out: Tensor, *, down: Tensor, up: Tensor
) -> Tensor:
    """Return a linear layer's output [..., out] with the adapter's added."""
    x = args[0]
    inner = x.flatten(0, -2) @ down.to(x.device).T
    return torch.addmm(out.flatten(0, -2), inner, up.to(x.device).T).view_as(out)


def read_chunk_adapter(folder: Path, model: PreTrainedModel) -> ChunkAdapter:
    """Return the chunk adapter in a folder, for a model.

    Args:
        folder: The folder with PEFT's two files.
        model: The model whose layers it names.

    Raises:
        ModelError: A file is missing or damaged, or it does not fit the model.
    """
    config = read_json_object(folder / ADAPTER_CONFIG, TRAIN_ANEW)
    modules, pairs = dict(model.named_modules()), dict[str, tuple[Tensor, Tensor]]()
    try:
        weights = load_file(folder / ADAPTER_WEIGHTS)
        scale = config["lora_alpha"] / config["r"]
        for name in sorted({name.rpartition(".lora_")[0] for name in weights}):
            down, up = (weights[f"{name}.lora_{part}.weight"] for part in "AB")
            layer: Any = modules[name.removeprefix(PEFT_PREFIX)]
            if (up.shape[0], down.shape[1]) != (layer.out_features, layer.in_features):
                raise KeyError(f"{name} has another shape")
            pairs[name.removeprefix(PEFT_PREFIX)] = (
                down.to(model.dtype),
                (up.float() * scale).to(model.dtype),
            )
    except (OSError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"The chunk adapter in '{folder}' cannot be read or does not fit the model ({error!r})."
            f" {TRAIN_ANEW}"
        ) from error
    return ChunkAdapter(pairs)
