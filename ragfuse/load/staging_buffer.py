"""Copy layers that were read to the device that fuses them.

On a CPU nothing is copied: the bytes read are used as they are, and become the memory tier's entry.
To a GPU they are copied through pinned memory on a CUDA stream of their own, while the model
computes (CacheBlend 5.1). PyTorch keeps pinned memory for later copies, and reuses it only once the
copy out of it is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

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
        """Copy what is not on the device yet into one block there, in as few copies as its place in
        memory allows.
        """
        ranges = _ranges(
            {id(part): part for part in _parts(layers) if part.device != self._device}.values()
        )
        sources = [each.source for each in ranges]
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
        for room, each in zip(places, ranges, strict=True):
            sent |= {id(part): part_of(room) for part, part_of in each.parts}
        moved = [
            {
                at: (
                    None
                    if kv is None
                    else LayerKV(sent.get(id(kv.keys), kv.keys), sent.get(id(kv.values), kv.values))
                )
                for at, kv in layer.items()
            }
            for layer in layers
        ]
        return PendingCopy(moved, torch.cuda.current_stream(self._device).record_event(), block)


@dataclass(frozen=True)
class _Range:
    """Bytes that are copied at once.

    Args:
        source: The bytes, uint8 [n].
        parts: Each tensor in them, with a function that returns it from a copy of the bytes.
    """

    source: Tensor
    parts: Sequence[tuple[Tensor, Callable[[Tensor], Tensor]]]


def _ranges(parts: Iterable[Tensor]) -> list[_Range]:
    """Return the bytes of all tensors, those of a storage in one range unless too much lies between
    them.
    """
    by_storage: dict[int, list[Tensor]] = {}
    alone = list[_Range]()
    for part in parts:
        if part.is_contiguous():
            by_storage.setdefault(part.untyped_storage().data_ptr(), []).append(part)
        else:
            alone.append(_range([part.contiguous()], [part]))
    return [*chain.from_iterable(map(_whole_or_apart, by_storage.values())), *alone]


def _whole_or_apart(parts: Sequence[Tensor]) -> list[_Range]:
    """Return one range for tensors of one storage, or one for each where a quarter of it would be
    other bytes.
    """
    wanted, whole = sum(part.nbytes for part in parts), _range(parts, parts)
    return (
        [whole]
        if whole.source.numel() <= 1.25 * wanted
        else [_range([part], [part]) for part in parts]
    )


def _range(parts: Sequence[Tensor], names: Sequence[Tensor]) -> _Range:
    """Return the range from the first to the last byte of contiguous tensors of one storage.

    Args:
        parts: The tensors.
        names: The tensors that they stand for.
    """
    begins = [int(part.storage_offset()) * part.element_size() for part in parts]
    lo, hi = (
        min(begins),
        max(begin + part.nbytes for begin, part in zip(begins, parts, strict=True)),
    )
    storage = parts[0].untyped_storage()
    source = torch.empty(0, dtype=torch.uint8, device=parts[0].device).set_(storage, lo, (hi - lo,))  # type: ignore[call-overload]
    views = [
        partial(_view, begin=begin - lo, like=part)
        for begin, part in zip(begins, parts, strict=True)
    ]
    return _Range(source, list(zip(names, views, strict=True)))


def _view(room: Tensor, begin: int, like: Tensor) -> Tensor:
    """Return the bytes of `room` from `begin` on as a tensor of the dtype and shape of `like`."""
    return room[begin : begin + like.nbytes].view(like.dtype).view(like.shape)


def _parts(layers: Sequence[Layer]) -> Iterator[Tensor]:
    """Yield keys and values of all layers, in the order in which they are copied."""
    for layer in layers:
        for kv in layer.values():
            if kv is not None:
                yield from (kv.keys, kv.values)
