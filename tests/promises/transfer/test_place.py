"""The KV of prompts on its way: what is put is read, by its handle alone, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ragfuse import Settings
from ragfuse.store import DiskTier, MemoryTier
from ragfuse.transfer import UNKNOWN, TransferError, TransferHandle, TransferModel, TransferPlace
from ragfuse.types.kv import ChunkKV, LayerKV
from tests.kits.redis_server import RedisServer
from tests.kits.tiny import python

IDS = tuple(range(40, 57))
MODEL = TransferModel("tiny", 3, 2, 8, "float32")
TENANT = TransferHandle.tenant_label("")
TTL_S = 300.0


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def kv(n_tokens: int = len(IDS), n_layers: int = 3, dtype: torch.dtype = torch.float32) -> ChunkKV:
    made = torch.Generator().manual_seed(1)
    parts = (
        [torch.randn(2, n_tokens, 8, generator=made).to(dtype) for _ in "kv"]
        for _ in range(n_layers)
    )
    return ChunkKV(tuple(LayerKV(*pair) for pair in parts))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Iterator[TransferPlace]:
    tier = (
        DiskTier(tmp_path, 1 << 20, lambda _: ())
        if request.param == "disk"
        else MemoryTier(1 << 20, lambda _: ())
    )
    made = TransferPlace(tier, TTL_S, clock=clock)
    yield made
    made.close()


def put(place: TransferPlace, **changes: Any) -> TransferHandle:
    return place.put(**{"kv": kv(), "token_ids": IDS, "model": MODEL, "tenant": TENANT, **changes})


def test_what_is_put_is_read_layer_by_layer(place: TransferPlace) -> None:
    handle = put(place)
    for found, wanted in zip(place.read(handle), kv().layers, strict=True):
        assert torch.equal(found.keys, wanted.keys)
        assert torch.equal(found.values, wanted.values)
    assert (handle.n_tokens, handle.nbytes) == (len(IDS), kv().nbytes)
    assert place.delete(handle)
    assert not place.delete(handle)
    assert place.n_waiting == 0
    with pytest.raises(TransferError, match="KV is not in"):
        next(place.read(handle))


def test_int8_takes_less_and_is_close(place: TransferPlace) -> None:
    handle = put(place, level="int8")
    assert handle.nbytes < kv().nbytes / 2
    for found, wanted in zip(place.read(handle), kv().layers, strict=True):
        torch.testing.assert_close(found.keys, wanted.keys, atol=0.03, rtol=0.03)


def test_a_handle_is_bound_to_tenant_model_tokens_and_secret(place: TransferPlace) -> None:
    handle = put(place)
    others = {
        "secret": "0" * 32,
        "tenant": TransferHandle.tenant_label("other"),
        "tokens": "0" * 32,
        "model": replace(MODEL, name="other"),
        "expires_s": handle.expires_s + 10_000,
        "n_tokens": 3,
        "level": "int8",
    }
    for name, value in others.items():
        with pytest.raises(TransferError, match="KV is not in"):
            next(place.read(replace(handle, **{name: value})))
    assert len({put(place).secret for _ in range(5)}) == 5


def test_a_handle_expires_and_is_swept(place: TransferPlace, clock: Clock) -> None:
    handle = put(place)
    clock.now_s += TTL_S - 1
    kept = put(place)
    assert next(place.read(handle))
    clock.now_s += 2
    assert place.sweep() == 1
    with pytest.raises(TransferError, match="KV is not in"):
        next(place.read(handle))
    assert place.n_waiting == 1
    assert next(place.read(kept))
    clock.now_s += TTL_S
    place.sweep_if_due()
    assert place.n_waiting == 0


def test_what_a_crashed_process_left_is_swept_when_a_place_is_opened(
    clock: Clock, tmp_path: Path
) -> None:
    left = TransferPlace(DiskTier(tmp_path, 1 << 20, lambda _: ()), TTL_S, clock=clock)
    put(left)
    clock.now_s += TTL_S + 1
    assert (
        TransferPlace(DiskTier(tmp_path, 1 << 20, lambda _: ()), TTL_S, clock=clock).n_waiting == 0
    )


def test_entries_of_a_store_are_never_swept(clock: Clock, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1 << 20, lambda _: ())
    place = TransferPlace(tier, TTL_S, clock=clock)
    handle = put(place)
    key = replace(handle.key, layout="")
    meta, *blobs = tier.get(handle.key, range(3)) or ()
    assert tier.put(key, meta, blobs)
    clock.now_s += 100 * TTL_S
    assert place.sweep() == 1
    assert [entry.key for entry in tier.list()] == [key]


def test_a_full_place_says_how_large_it_is(tmp_path: Path) -> None:
    settings = Settings(transfer_url=str(tmp_path / "place"), transfer_bytes=2 * kv().nbytes)
    place = TransferPlace.open(settings)
    kept = put(place)
    with pytest.raises(TransferError, match="RAGFUSE_TRANSFER_BYTES"):
        put(place)
    assert next(place.read(kept))
    place.close()


def test_a_damaged_layer_is_never_read(clock: Clock, tmp_path: Path) -> None:
    place = TransferPlace(DiskTier(tmp_path, 1 << 20, lambda _: ()), TTL_S, clock=clock)
    handle = put(place)
    path = next(path for path in (tmp_path / "chunks").rglob("*") if path.is_file())
    data = bytearray(path.read_bytes())
    data[-70] ^= 1
    path.write_bytes(data)
    with pytest.raises(TransferError, match="damaged"):
        list(place.read(handle))
    assert place.n_waiting == 0


def test_a_handle_survives_json_and_nothing_else_becomes_one(place: TransferPlace) -> None:
    handle = put(place)
    told = handle.as_dict()
    assert TransferHandle.from_dict(told) == handle
    lies: list[object] = [
        None,
        {},
        {**told, "more": 1},
        {**told, "n_tokens": True},
        {**told, "secret": "../../x"},
        {**told, "model": {**told["model"], "name": ""}},
        {**told, "level": "x" * 10_000},
    ]
    for lie in lies:
        with pytest.raises(TransferError, match="kv_transfer_params"):
            TransferHandle.from_dict(lie)


def test_a_handle_says_what_differs(place: TransferPlace, clock: Clock) -> None:
    handle = put(place)
    handle.check(IDS, MODEL, clock())
    for ids, model, now_s, says in (
        (IDS[:-1], MODEL, clock(), "tokens"),
        ((*IDS[:-1], 0), MODEL, clock(), "token ids"),
        (IDS, replace(MODEL, dtype="bfloat16"), clock(), "bfloat16"),
        (IDS, replace(MODEL, name="other"), clock(), "other"),
        (IDS, MODEL, clock() + 2 * TTL_S, "expired"),
    ):
        with pytest.raises(TransferError, match=says):
            handle.check(ids, model, now_s)
    known = replace(handle, weights="1" * 32)
    for one, here in ((handle, "2" * 32), (known, UNKNOWN), (known, "1" * 32)):
        one.check(IDS, MODEL, clock(), here)
    with pytest.raises(TransferError, match="weights"):
        known.check(IDS, MODEL, clock(), "2" * 32)


def test_a_place_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for url, says in (
        ("", "RAGFUSE_TRANSFER_URL"),
        (str(tmp_path / "file"), "cannot be opened"),
        ("redis://:secret@127.0.0.1:1/0", "does not answer"),
    ):
        with pytest.raises(TransferError, match=says) as raised:
            TransferPlace.open(Settings(transfer_url=url))
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("kind", ["redis", "objects"])
def test_both_engines_reach_one_place_by_its_url(kind: str, tmp_path: Path) -> None:
    server = RedisServer(tmp_path) if kind == "redis" else None
    url = (
        f"redis://127.0.0.1:{server.port}/0"
        if server is not None
        else f"file://{tmp_path / 'objects'}"
    )
    settings = Settings(transfer_url=url, transfer_ttl_s=30.0)
    prefills, decodes = TransferPlace.open(settings), TransferPlace.open(settings)
    handle = TransferHandle.from_dict(put(prefills).as_dict())
    for found, wanted in zip(decodes.read(handle), kv().layers, strict=True):
        assert torch.equal(found.values, wanted.values)
    assert decodes.delete(handle)
    with pytest.raises(TransferError, match="KV is not in"):
        next(prefills.read(handle))
    for place in (prefills, decodes):
        assert place.n_waiting == 0
        place.close()
    if server is not None:
        server.kill()


def test_neither_transformers_nor_a_model_is_imported() -> None:
    found = python(
        """
        import json, sys
        import ragfuse.transfer
        print(json.dumps([name for name in sys.modules if name.split(".")[0] == "transformers"]))
        """
    )
    assert found == []
