"""Layers on their way to a device: as they are on a CPU, whole and unchanged on a GPU, from any kind of memory."""

import pytest
import torch

from ragfuse.core import LayerKV
from ragfuse.load.layers import LayerReader
from ragfuse.load.staging import Staging, _Buffer
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore, MemoryTier
from tests.load.test_layers import CHUNKS, LAYERS, fetches, loading
from tests.store.kit import key, kv, same

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def layers(n: int = 3) -> list[dict[int, LayerKV | None]]:
    return [{0: layer, 2: None, 4: layer} for layer in kv(7, n=5, n_layers=n).layers]


def test_on_a_cpu_nothing_is_copied():
    staging, sent = Staging(CPU), layers()
    assert staging.landed(staging.send(sent)) is sent


def test_parts_in_a_buffer_lie_apart_and_the_buffer_grows_only_when_it_must():
    buffer = _Buffer()
    parts = buffer.room([10, 64, 0, 100])
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    assert [part.tolist() for part in parts] == [[1] * 10, [2] * 64, [], [4] * 100]
    assert all(part.data_ptr() % 2 == 0 for part in parts)
    assert buffer.room([64])[0].data_ptr() == parts[0].data_ptr()
    assert buffer.room([1000])[0].numel() == 1000
    assert buffer.room([]) == []


@needs_gpu
def test_layers_arrive_on_a_gpu_as_they_were_from_any_memory():
    device, sent = torch.device("cuda"), layers(4)
    pinned = [{0: LayerKV(each[0].keys.pin_memory(), each[0].values.pin_memory())} for each in sent]
    there = [{0: LayerKV(each[0].keys.cuda(), each[0].values.cuda())} for each in sent]
    staging = Staging(device)
    for step in (sent, pinned, there, sent, sent[:1]):  # more steps than buffers
        landed = staging.landed(staging.send(step))
        for before, after in zip(step, landed, strict=True):
            assert {at for at, layer in after.items() if layer is None} == {at for at in before if before[at] is None}
            for at in before.keys() - {2}:
                assert after[at].keys.device.type == after[at].values.device.type == "cuda"
                assert same(LayerKV(after[at].keys.cpu(), after[at].values.cpu()), before[at])


@needs_gpu
@pytest.mark.parametrize("tiers", [("memory", "gpu", "disk"), ("gpu",) * 3])
def test_layers_of_all_tiers_are_read_onto_the_gpu(tmp_path, tiers):
    made = [MemoryTier(1 << 24, lru, device="cuda", name="gpu"), MemoryTier(1 << 24, lru, pin_memory=True)]
    with KVStore([*made, DiskTier(tmp_path, 1 << 24, lru)]) as store:
        for number, chunk in enumerate(CHUNKS):
            assert store.put(key(number), chunk, wait=True)
        with LayerReader(store, fetches(*tiers, a_read=3), LAYERS, device=torch.device("cuda")) as reader:
            assert bool(loading()) == (set(tiers) != {"gpu"})
            for layer in range(LAYERS):
                for number, found in enumerate(reader.read(layer).values()):
                    assert found.keys.device.type == "cuda"
                    assert same(LayerKV(found.keys.cpu(), found.values.cpu()), CHUNKS[number].layers[layer])
