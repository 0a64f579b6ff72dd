"""Layers on their way to a device: as they are on a CPU, whole and unchanged on a GPU, from any
kind of memory.
"""

import pytest
import torch

from ragfuse.load.layers import LayerReader
from ragfuse.load.staging_buffer import StagingBuffer, _ranges
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore, MemoryTier
from ragfuse.types.kv import LayerKV
from tests.load.test_layers import CHUNKS, LAYERS, fetches, loading
from tests.store.kit import key, kv, same

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def layers(n=3):
    return [{0: layer, 2: None, 4: layer} for layer in kv(7, n=5, n_layers=n).layers]


def test_on_a_cpu_nothing_is_copied():
    staging, sent = StagingBuffer(CPU), layers()
    assert staging.landed(staging.send(sent)) is sent


def in_one_block(*sizes, gap=0):
    """Tensors of random bfloat16 values that lie in one storage, `gap` values apart, behind three
    others.
    """
    block = torch.randn(3 + sum(sizes) + gap * len(sizes)).to(torch.bfloat16)
    starts = [3 + sum(sizes[:at]) + gap * at for at in range(len(sizes))]
    return [
        block[start : start + size].view(1, size, 1)
        for start, size in zip(starts, sizes, strict=True)
    ]


@pytest.mark.parametrize(
    ("parts", "copies"),
    [
        (in_one_block(8, 8, 16), 1),
        (in_one_block(64, 64, 64, gap=4), 1),
        (in_one_block(8, 8, gap=100), 2),
        (in_one_block(8, 8) + in_one_block(5), 2),
        ([torch.randn(4, 6, 2)[:, 1:4]], 1),
        (in_one_block(0, 4), 1),
        ([], 0),
    ],
)
def test_what_lies_close_together_is_copied_at_once_and_comes_out_as_it_was(parts, copies):
    ranges = _ranges(parts)
    assert len(ranges) == copies
    found = {
        id(part): part_of(each.source.clone()) for each in ranges for part, part_of in each.parts
    }
    assert len(found) == len(parts)
    for part in parts:
        assert found[id(part)].dtype == part.dtype
        assert torch.equal(found[id(part)], part)


def steps_of(count, n, pin=False):
    """Steps of two layers of some megabytes, each with values of its own."""
    made = []
    for number in range(count):
        parts = (
            torch.full((4, n, 128), float(2 * number + part), dtype=torch.bfloat16)
            for part in (0, 1)
        )
        kv = LayerKV(*(part.pin_memory() if pin else part for part in parts))
        made.append([{0: kv, 2: None}, {0: kv, 2: None}])
    return made


@needs_gpu
@pytest.mark.parametrize("pin", [False, True])
def test_layers_arrive_as_they_were_however_busy_both_streams_are(pin):
    device, steps = torch.device("cuda"), steps_of(6, 4096, pin)
    staging, sums = StagingBuffer(device), []
    for step in steps:  # each sent while the copies before it still wait
        with torch.cuda.stream(staging._stream):
            torch.cuda._sleep(20_000_000)
        landed = staging.landed(staging.send(step))
        torch.cuda._sleep(5_000_000)
        sums.append(
            [
                (layer[0].keys.float().mean(), layer[0].values.float().mean(), layer[2])
                for layer in landed
            ]
        )
        del landed  # what it took may be given to the next step only once the sums are done
    for number, step in enumerate(sums):
        assert [(float(keys), float(values), none) for keys, values, none in step] == [
            (2.0 * number, 2.0 * number + 1, None)
        ] * 2


@needs_gpu
@pytest.mark.parametrize("tiers", [("memory", "gpu", "disk"), ("gpu",) * 3])
def test_layers_of_all_tiers_are_read_onto_the_gpu(tmp_path, tiers):
    made = [
        MemoryTier(1 << 24, lru, device="cuda", name="gpu"),
        MemoryTier(1 << 24, lru, pin_memory=True),
    ]
    with KVStore([*made, DiskTier(tmp_path, 1 << 24, lru)]) as store:
        for number, chunk in enumerate(CHUNKS):
            assert store.put(key(number), chunk, wait=True)
        with LayerReader(store, fetches(*tiers, a_read=3), LAYERS, device=made[0].device) as reader:
            assert bool(loading()) == (set(tiers) != {"gpu"})
            for layer in range(LAYERS):
                for number, found in enumerate(reader.read(layer).values()):
                    assert found.keys.device.type == "cuda"
                    assert same(
                        LayerKV(found.keys.cpu(), found.values.cpu()), CHUNKS[number].layers[layer]
                    )
