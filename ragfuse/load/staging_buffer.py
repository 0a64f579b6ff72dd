"""Copy layers that were read to the device that fuses them.

On a CPU nothing is copied: the bytes read are used as they are, and become the memory tier's entry.
To a GPU they are copied through pinned memory on a CUDA stream of their own, while the model
computes (CacheBlend 5.1). PyTorch keeps pinned memory for later copies, and reuses it only once the
copy out of it is done.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragfuse.store.tier import aligned, rooms
from ragfuse.types.kv import LayerKV

log = logging.getLogger("ragfuse.load")

Layer = Mapping[int, LayerKV | None]
"""One layer's KV by segment; None for a segment that could not be read."""


@dataclass(frozen=True)
class PendingCopy:
    """Layers that are being copied to a device.

    Args:
        layers: The layers on the device.
        event: The CUDA event after which they may be used; None: at once.
        block: The memory of the device that they were copied into, uint8.
    """

    layers: Sequence[Layer]
    event: torch.cuda.Event | None = None
    block: Tensor | None = None


class StagingBuffer:
    """Copies layers to a device: `send` on the thread that reads, `landed` on the one that fuses.

    Args:
        device: The device to copy to.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, layers: Sequence[Layer]) -> PendingCopy:
        """Begin to copy layers to the device; without memory for that, return them as they are, to
        be copied later.
        """
        if self._stream is None:
            return PendingCopy(layers)
        try:
            with torch.cuda.stream(self._stream):
                return self._send(layers)
        except RuntimeError as error:
            log.warning(
                "Layers could not be copied to %s ahead of time; they are copied when used, which"
                " is slower: %s",
                self._device,
                error,
            )
            return PendingCopy(layers)

    def landed(self, sent: PendingCopy) -> Sequence[Layer]:
        """Make the calling thread's current CUDA stream wait for a copy, and return the layers for
        use on it.
        """
        if sent.event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(sent.event)
            if sent.block is not None:
                sent.block.record_stream(stream)
        return sent.layers

    def _send(self, layers: Sequence[Layer]) -> PendingCopy:
        """Copy what is not on the device yet into one block there: through pinned memory if it is
        not pinned itself, and as one range of bytes where it lies in one storage, as the layers of
        an entry do.
        """
        storages = defaultdict[int, dict[int, Tensor]](dict)
        for part in _parts(layers):
            if part.device != self._device:
                flat = part.contiguous()
                storages[flat.untyped_storage().data_ptr()].setdefault(id(part), flat)
        ranges = [(_bytes_of(flats.values()), flats) for flats in storages.values()]
        sources = [source for (source, _), _ in ranges]
        nbytes = sum(aligned(source.numel()) for source in sources)
        block = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        places = rooms(block, sources)
        if all(source.device.type == "cpu" and not source.is_pinned() for source in sources):
            pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            for room, source in zip(rooms(pinned, sources), sources, strict=True):
                room.copy_(source)
            block.copy_(pinned, non_blocking=True)
        else:
            for room, source in zip(places, sources, strict=True):
                room.copy_(source, non_blocking=True)
        sent = dict[int, Tensor]()
        for room, ((_, begins), flats) in zip(places, ranges, strict=True):
            for begin, (name, flat) in zip(begins, flats.items(), strict=True):
                sent[name] = room[begin : begin + flat.nbytes].view(flat.dtype).view(flat.shape)
        moved = [
            {
                at: kv
                and LayerKV(sent.get(id(kv.keys), kv.keys), sent.get(id(kv.values), kv.values))
                for at, kv in layer.items()
            }
            for layer in layers
        ]
        return PendingCopy(moved, torch.cuda.current_stream(self._device).record_event(), block)


def _bytes_of(flats: Collection[Tensor]) -> tuple[Tensor, list[int]]:
    """Return the bytes from the first to the last of contiguous tensors of one storage, uint8 [n],
    and where each tensor begins in them.
    """
    begins = [int(flat.storage_offset()) * flat.element_size() for flat in flats]
    lo = min(begins)
    hi = max(begin + flat.nbytes for begin, flat in zip(begins, flats, strict=True))
    first = next(iter(flats))
    source = torch.empty(0, dtype=torch.uint8, device=first.device)
    source.set_(first.untyped_storage(), lo, (hi - lo,))  # type: ignore[call-overload]
    return source, [begin - lo for begin in begins]


def _parts(layers: Sequence[Layer]) -> Iterator[Tensor]:
    """Yield keys and values of all layers, in the order in which they are copied."""
    for layer in layers:
        for kv in layer.values():
            if kv is not None:
                yield from (kv.keys, kv.values)
