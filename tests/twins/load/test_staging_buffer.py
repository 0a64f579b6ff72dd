"""Layers on their way to a device: as they are on a CPU, whole and unchanged on a GPU, from any
kind of memory.
"""

import pytest
import torch

from ragfuse.load.layers import LayerReader, StagingBuffer, _bytes_of
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore, MemoryTier
from ragfuse.types.kv import LayerKV
from tests.kits.store import key, kv, same
from tests.twins.load.test_layers import CHUNKS, LAYERS, by_layer, loading, plan

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def layers(n=3):
    return [{0: layer, 2: None, 4: layer} for layer in kv(7, n=5, n_layers=n).layers]


def test_on_a_cpu_nothing_is_copied():
    staging, sent = StagingBuffer(CPU), layers()
    assert staging.send(sent)() is sent


def test_tensors_of_one_storage_are_copied_at_once_and_come_out_as_they_were():
    block = torch.randn(40).to(torch.bfloat16)  # behind three others, with a gap
    parts = [block[lo:hi].view(1, -1, 1) for lo, hi in ((11, 19), (3, 11), (20, 20), (22, 38))]
    source, begins = _bytes_of(parts)
    assert source.numel() == 2 * (38 - 3)
    for part, begin in zip(parts, begins, strict=True):
        found = source.clone()[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
        assert torch.equal(found, part)


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
        landed = staging.send(step)()
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
        with LayerReader(store, plan(*tiers, a_read=3), LAYERS, made[0].device) as reader:
            assert bool(loading()) == (set(tiers) != {"gpu"})
            for layer, came in enumerate(by_layer(reader)):
                for number, found in enumerate(came.values()):
                    assert found.keys.device.type == "cuda"
                    assert same(
                        LayerKV(found.keys.cpu(), found.values.cpu()), CHUNKS[number].layers[layer]
                    )
