"""Copy layers that were read to the device that fuses them.

On a CPU nothing is copied: the bytes read are used as they are, and become the memory tier's entry. To a GPU they are
copied through pinned buffers on a CUDA stream of their own, while the model computes (CacheBlend 5.1).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ragfuse.store.tier import LAYER_ALIGNMENT
from ragfuse.types.kv import LayerKV

log = logging.getLogger("ragfuse.load")

BUFFERS = 2
"""Pinned buffers: one is filled while the other is copied to the device."""

Layer = Mapping[int, LayerKV | None]
"""One layer's KV by segment; None for a segment that could not be read."""


@dataclass(frozen=True)
class PendingCopy:
    """Layers that are being copied to a device.

    Args:
        layers: The layers on the device.
        event: The CUDA event after which they may be used; None: at once.
    """

    layers: Sequence[Layer]
    event: torch.cuda.Event | None = None


class StagingBuffer:
    """Pinned buffers to copy layers to a device: `send` on the thread that reads, `landed` on the one that fuses.

    Args:
        device: The device to copy to.
        nbytes: Bytes of the largest read, about. The buffers are allocated with this size at the first `send`.
    """

    def __init__(self, device: torch.device, nbytes: int = 0) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buffers = deque(_Buffer(nbytes) for _ in range(BUFFERS))

    def send(self, layers: Sequence[Layer]) -> PendingCopy:
        """Begin to copy layers to the device; without memory for that, return them as they are, to be copied later."""
        if self._stream is None:
            return PendingCopy(layers)
        try:
            with torch.cuda.stream(self._stream):
                return self._send(layers)
        except RuntimeError as error:
            log.warning(
                "Layers could not be copied to %s ahead of time; they are copied when used, which is slower: %s",
                self._device,
                error,
            )
            return PendingCopy(layers)

    def landed(self, sent: PendingCopy) -> Sequence[Layer]:
        """Make the calling thread's current CUDA stream wait for a copy, and return the layers for use on it."""
        if sent.event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(sent.event)
            for part in _parts(sent.layers):
                part.record_stream(stream)
        return sent.layers

    def _send(self, layers: Sequence[Layer]) -> PendingCopy:
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        parts = {id(part): part for part in _parts(layers)}
        pinned = iter(buffer.room([part.nbytes for part in parts.values() if _is_pageable(part)]))
        sent: dict[int, Tensor] = {}

        def on_device(part: Tensor) -> Tensor:
            """Return a tensor on the device, copied only once for all segments that share it."""
            at = id(part)
            if at not in sent:
                if _is_pageable(part):
                    part = next(pinned).view(part.dtype).view(part.shape).copy_(part)
                sent[at] = part.to(self._device, non_blocking=True)
            return sent[at]

        moved = [
            {at: None if kv is None else LayerKV(on_device(kv.keys), on_device(kv.values)) for at, kv in layer.items()}
            for layer in layers
        ]
        buffer.sent = torch.cuda.current_stream(self._device).record_event()
        return PendingCopy(moved, buffer.sent)


class _Buffer:
    """Pinned host memory of at least `nbytes`; it is reused only after the copy of its last content (`sent`) ended."""

    def __init__(self, nbytes: int = 0) -> None:
        self._min_nbytes, self._bytes = nbytes, torch.empty(0, dtype=torch.uint8)
        self.sent: torch.cuda.Event | None = None

    def room(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return a separate part of the buffer, uint8 `[size]`, for each size."""
        ends = list(accumulate(-(-size // LAYER_ALIGNMENT) * LAYER_ALIGNMENT for size in sizes))
        if self.sent is not None:
            self.sent.synchronize()
        if ends and ends[-1] > self._bytes.numel():
            nbytes = max(ends[-1], self._min_nbytes)
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return [self._bytes[at : at + size] for at, size in zip([0, *ends], sizes, strict=False)]


def _is_pageable(part: Tensor) -> bool:
    return part.device.type == "cpu" and not part.is_pinned()


def _parts(layers: Sequence[Layer]) -> Iterator[Tensor]:
    """Yield keys and values of all layers, in the order in which they are copied."""
    for layer in layers:
        for kv in layer.values():
            if kv is not None:
                yield from (kv.keys, kv.values)
