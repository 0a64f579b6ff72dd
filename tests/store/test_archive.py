"""Archives: what is exported comes back bit for bit, and a damaged or hostile one does no harm."""

import json
import os
import random
import signal
import tarfile

import pytest
import torch

from ragfuse.errors import StoreError
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore, MemoryTier, bulk
from ragfuse.store import archive as archive_file
from ragfuse.store.archive import ArchivedText
from ragfuse.store.chunkfile import Header, pack_header, pieces
from ragfuse.store.plainfile import SPARSE_NBYTES
from ragfuse.store.tier import EntryMeta
from ragfuse.types.keys import FORMAT_VERSION, ChunkKey
from tests.store.kit import child, encoded, files, key, kv, same
from tests.store.lies import Told, lies, little_memory, packed

MB = 1 << 20
KEYS = [key(i) for i in range(4)]
TEXTS = [ArchivedText(KEYS[i].model, str(KEYS[i]), f"text {i}\n\0é", f"{i}.txt") for i in range(3)]


@pytest.fixture
def store(tmp_path):
    with KVStore([MemoryTier(MB, lru), DiskTier(tmp_path / "from", MB, lru)]) as store:
        for i, one in enumerate(KEYS):
            store.put(one, kv(i, n=5 + i), wait=True)
        yield store


@pytest.fixture
def empty(tmp_path):
    with KVStore([MemoryTier(MB, lru), DiskTier(tmp_path / "to", MB, lru)]) as store:
        yield store


@pytest.fixture
def archive(store, tmp_path):
    path = tmp_path / "chunks.tar"
    bulk.export(store, path, KEYS, TEXTS)
    return path


def holds(store: KVStore, *numbers: int) -> bool:
    """Whether exactly these chunks are in the slow tier, and right."""
    kept = set(store.tiers[1].entries())
    right = all(
        same(layer[0], wanted)
        for i in numbers
        for n, wanted in enumerate(kv(i, n=5 + i).layers)
        if (layer := store.read_layers(KEYS[i], n, tier="disk"))
    )
    return right and kept == {KEYS[i] for i in numbers}


def member(name: str, data: bytes, **changes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = changes.pop("size", len(data))
    for field, value in changes.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def made(path, *members: bytes, version=FORMAT_VERSION, end=True):
    """An archive of these members, written by hand."""
    first = member("ragfuse-archive.json", json.dumps({"version": version}).encode())
    path.write_bytes(first + b"".join(members) + (bytes(1024) if end else b""))
    return path


def entry(name: ChunkKey, meta: EntryMeta, blobs) -> bytes:
    return b"".join(map(bytes, pieces(pack_header(name, meta.sealed(blobs)), blobs)))


# there and back


def test_what_is_exported_comes_back_bit_for_bit_with_its_texts(empty, archive):
    texts = []
    done = bulk.import_(empty, archive, take_texts=texts.extend)
    assert (done.chunks, done.known, done.failed, done.texts) == (4, 0, 0, 3)
    assert texts == TEXTS
    assert holds(empty, 0, 1, 2, 3)
    again = bulk.import_(empty, archive)
    assert (again.chunks, again.known, again.failed) == (0, 4, 0)


def test_chunks_of_megabytes_come_back_bit_for_bit(tmp_path):
    wanted = {key(n): kv(n, n=n) for n in (3000, 8000, 12_000)}  # 0.8, 2.2 and 3.4 MB, so that holes are looked for
    assert max(chunk.nbytes for chunk in wanted.values()) > 3 * SPARSE_NBYTES
    path = tmp_path / "large.tar"
    with KVStore([DiskTier(tmp_path / "large", 64 * MB, lru)]) as store:
        for one, chunk in wanted.items():
            store.put(one, chunk, wait=True)
        bulk.export(store, path, list(wanted), [])
    with KVStore([DiskTier(tmp_path / "again", 64 * MB, lru)]) as store:
        done = bulk.import_(store, path)
        assert (done.chunks, done.failed) == (3, 0)
        for one, chunk in wanted.items():
            for n, layer in enumerate(chunk.layers):
                assert same(store.read_layers(one, n)[0], layer)


def test_an_archive_is_a_tar_of_chunk_files_that_a_disk_tier_takes_as_they_are(archive, tmp_path):
    with tarfile.open(archive) as tar:
        assert tar.getnames()[0] == "ragfuse-archive.json"
        tar.extractall(tmp_path / "unpacked", filter="data")
    tier = DiskTier(tmp_path / "unpacked", MB, lru)
    assert set(tier.entries()) == set(KEYS)
    assert torch.equal(tier.read(KEYS[2], 1)[1], encoded(kv(2, n=7))[1][1])
    tier.close()


def test_only_what_is_asked_for_is_exported_and_what_is_not_there_is_told(store, empty, tmp_path):
    told = []
    done = bulk.export(
        store, tmp_path / "a.tar", [KEYS[1], key("stranger"), KEYS[1]], progress=lambda *bytes: told.append(bytes)
    )
    assert (done.chunks, done.failed) == (1, 1)
    assert (done.troubles[0].what, done.troubles[0].why) == (str(key("stranger")), "it is not in the store")
    assert told[-1][0] == told[-1][1] > 0
    assert bulk.import_(empty, tmp_path / "a.tar").chunks == 1
    assert holds(empty, 1)


def test_a_damaged_entry_is_left_out_of_an_export(store, tmp_path):
    store.tiers[0].delete(KEYS)
    path = files(tmp_path / "from")[0]
    path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    done = bulk.export(store, tmp_path / "a.tar")
    assert (done.chunks, done.failed, done.troubles[0].why) == (3, 1, "it cannot be read")


def test_import_tells_how_far_it_is_and_goes_where_it_is_told(empty, archive):
    told = []
    assert bulk.import_(empty, archive, tier="memory", progress=lambda *bytes: told.append(bytes)).chunks == 4
    assert {entry.tier for entry in empty.entries()} == {"memory"}
    assert told == sorted(told)
    assert told[-1][0] <= told[-1][1] == archive.stat().st_size
    with pytest.raises(StoreError, match="no tier 'tape'"):
        bulk.import_(empty, archive, tier="tape")


def test_an_archive_larger_than_the_tier_leaves_what_fits_and_tells_the_rest(archive, tmp_path):
    size = max(path.stat().st_size for path in files(tmp_path / "from"))
    with KVStore([DiskTier(tmp_path / "small", 2 * size, lru)]) as small:
        done = bulk.import_(small, archive)
        assert done.chunks == len(small.entries()) == 2
        assert done.failed == 2
        assert "space" in done.troubles[0].why
    with KVStore([DiskTier(tmp_path / "tiny", 100, lru)]) as tiny:
        done = bulk.import_(tiny, archive)
        assert (done.chunks, done.failed) == (0, 4)
        assert "has 100 in all" in done.troubles[0].why


# damage


def test_a_cut_archive_gives_what_is_whole_and_says_that_it_was_cut(archive, tmp_path, empty):
    data, chance = archive.read_bytes(), random.Random(2)
    for _ in range(25):
        cut = tmp_path / "cut.tar"
        cut.write_bytes(data[: chance.randrange(1024, len(data) - 1024)])
        done = bulk.import_(empty, cut)
        assert done.failed > 0
        assert any("cut off" in trouble.why or "middle" in trouble.why for trouble in done.troubles)
        assert empty.clear() == done.chunks


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_damaged_chunk_is_left_out_and_all_others_are_kept(archive, empty, tmp_path, count):
    data, chance = archive.read_bytes(), random.Random(4)
    bad = tmp_path / "bad.tar"
    for _ in range(count):
        at = chance.randrange(1024, len(data) - 1024)
        bad.write_bytes(data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :])
        done = bulk.import_(empty, bad)
        assert done.chunks >= 3
        kept = [i for i, one in enumerate(KEYS) if one in empty.tiers[1].entries()]
        assert len(kept) == done.chunks
        assert holds(empty, *kept)
        empty.clear()


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\3\4" + bytes(2000), bytes(4096), b"x" * 5000, member("notes.txt", b"hello") + bytes(1024)],
)
def test_a_file_that_is_no_archive_is_refused(empty, tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(StoreError, match=r"Wanted an archive .* found another kind of file"):
        bulk.import_(empty, tmp_path / "file")


def test_an_archive_of_another_version_a_folder_and_nothing_are_refused(empty, tmp_path):
    with pytest.raises(StoreError, match="of version 99"):
        bulk.import_(empty, made(tmp_path / "new.tar", version=99))
    with pytest.raises(StoreError, match="found a folder"):
        bulk.import_(empty, tmp_path)
    with pytest.raises(StoreError, match="found nothing"):
        bulk.import_(empty, tmp_path / "nope")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="no file"):
        bulk.import_(empty, tmp_path / "pipe")


# malice


def test_names_links_devices_and_foreign_members_make_no_file_and_no_harm(empty, tmp_path):
    good = entry(KEYS[0], *encoded(kv(0)))
    path = made(
        tmp_path / "evil.tar",
        member("../../outside.kv", good),
        member("/etc/passwd", b"x"),
        member("link", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("hard", b"", type=tarfile.LNKTYPE, linkname="../../x"),
        member("device", b"", type=tarfile.CHRTYPE),
        member("long", b"a" * 4000, type=tarfile.GNUTYPE_LONGNAME),
        member("pax", b"1000000 path=x\n" * 99, type=tarfile.XHDTYPE),
        member("\x1b[31mred\r\n", b"nothing"),
    )
    before = {found for found in tmp_path.rglob("*") if "to" not in found.parts}
    done = bulk.import_(empty, path)
    assert (done.chunks, done.failed) == (1, 7)
    assert set(empty.tiers[1].entries()) == {KEYS[0]}
    assert {found for found in tmp_path.rglob("*") if "to" not in found.parts} == before
    assert all(trouble.what.isprintable() and trouble.why.isprintable() for trouble in done.troubles)


def hostile() -> dict[str, bytes]:
    """Members that say what is not so, their checksums right."""
    meta, blobs = encoded(kv(0))
    layer = meta.sealed(blobs).layers[0]
    described = json.loads(meta.sealed(blobs).to_json())

    def with_key(text: str) -> bytes:
        class Named(ChunkKey):
            def __str__(self) -> str:
                return text

        return b"".join(map(bytes, pieces(pack_header(Named("a", "b"), meta.sealed(blobs)), blobs)))

    def with_meta(text: str) -> bytes:
        class Said:
            def to_json(self) -> str:
                return text

        return b"".join(map(bytes, pieces(pack_header(KEYS[0], Said()), blobs)))

    def with_layer(**changes) -> bytes:
        layers = [{**described["layers"][0], **changes}, *described["layers"][1:]]
        return with_meta(json.dumps({**described, "layers": layers}))

    return {
        "a key that leads elsewhere": with_key("../../a.b.-.-"),
        "a key with a slash": with_key("aa/bb.cc.-.-"),
        "a key of nothing": with_key("...."),
        "a key without end": with_key("a" * 10_000 + ".bb.-.-"),
        "a shape that is too large": with_layer(key_shape=[2, 5, 1 << 40]),
        "a shape of other size": with_layer(key_shape=[2, 5, 4]),
        "more bytes than there are": with_layer(nbytes=1 << 50),
        "fewer bytes than there are": with_layer(nbytes=64),
        "no checksum": with_layer(checksum=""),
        "tokens that are no number": with_meta(json.dumps({**described, "n_tokens": 5.0})),
        "lists without end": with_meta("[" * 100_000),
        "a number without end": with_meta('{"version": ' + "9" * 10_000 + "}"),
        "layers without number": with_meta(json.dumps({**described, "layers": [layer.as_dict()] * 5000})),
        "half an entry": entry(KEYS[0], meta, blobs)[:-64],
        "more than an entry": entry(KEYS[0], meta, blobs) + bytes(64),
        "no entry": b"nothing of the kind",
        "nothing": b"",
    }


@pytest.mark.parametrize("name", hostile())
def test_an_entry_that_says_what_is_not_so_is_left_out(empty, tmp_path, name):
    good = entry(KEYS[1], *encoded(kv(1, n=6)))
    done = bulk.import_(
        empty, made(tmp_path / "evil.tar", member("chunks/x.kv", hostile()[name]), member("ok.kv", good))
    )
    assert (done.chunks, done.failed) == (1, 1)
    assert holds(empty, 1)
    assert len(files(tmp_path / "to")) == 1


@pytest.mark.parametrize("size", [1 << 20, 8 << 30, 1 << 60])
def test_sizes_beyond_the_file_are_not_believed(empty, tmp_path, size):
    good = entry(KEYS[1], *encoded(kv(1, n=6)))
    done = bulk.import_(empty, made(tmp_path / "evil.tar", member("ok.kv", good), member("huge.kv", b"x", size=size)))
    assert (done.chunks, done.failed) == (1, 1)
    assert "middle" in done.troubles[0].why


def test_more_trouble_than_can_be_told_is_counted(empty, tmp_path):
    done = bulk.import_(empty, made(tmp_path / "evil.tar", *[member(f"{i}", b"x") for i in range(500)]))
    assert done.failed == 500
    assert len(done.troubles) == 100


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1, 2]",
        json.dumps({"model": "m", "key": "k", "text": "t"}),
        json.dumps({**TEXTS[0]._asdict(), "text": 3}),
        json.dumps({**TEXTS[0]._asdict(), "model": "0" * 32}),
        json.dumps({**TEXTS[0]._asdict(), "more": ""}),
        "[" * 100_000,
        "\udcff",
    ],
)
def test_texts_that_are_none_are_left_out(empty, tmp_path, line):
    taken = []
    text = member("texts/0.jsonl", (line + "\n").encode(errors="surrogateescape"))
    done = bulk.import_(empty, made(tmp_path / "evil.tar", text), take_texts=taken.extend)
    assert (done.texts, done.failed, taken) == (0, 1, [])


def test_entries_of_another_codec_are_left_out(store, archive, tmp_path):
    with KVStore([DiskTier(tmp_path / "other", MB, lru)], lambda level, model: None) as other:
        done = bulk.import_(other, archive)
        assert (done.chunks, done.failed) == (0, 4)
        assert "at level raw, which this store cannot decode" in done.troubles[0].why


# writing


def test_an_export_replaces_an_older_one_only_when_it_is_whole(store, archive, tmp_path):
    before = archive.read_bytes()

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bulk.export(store, archive, KEYS[:2], progress=stop)
    assert archive.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if "tar" in path.name] == [archive.name]
    bulk.export(store, archive, KEYS[:2])
    assert len(archive.read_bytes()) < len(before)


def test_an_archive_is_for_this_user_alone(archive):
    assert archive.stat().st_mode & 0o777 == 0o600


def test_a_place_that_cannot_be_written_is_named(store, tmp_path):
    for path in (tmp_path / "no" / "a.tar", tmp_path):
        with pytest.raises(StoreError, match=r"cannot be written to .*Name another file"):
            bulk.export(store, path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.slow
def test_an_export_ended_by_ctrl_c_leaves_nothing(tmp_path):
    code = """
        import sys, time
        from pathlib import Path
        from ragfuse.plan.evict import lru
        from ragfuse.store import DiskTier, KVStore
        from tests.store.kit import key, kv

        from ragfuse.store import bulk

        with KVStore([DiskTier(sys.argv[1] + "/store", 1 << 20, lru)]) as store:
            for i in range(3):
                store.put(key(i), kv(i), wait=True)

            def told(done, total):
                print("half", flush=True)
                time.sleep(60)

            bulk.export(store, Path(sys.argv[1]) / "a.tar", progress=told)
    """
    process = child(code, tmp_path)
    assert process.stdout.readline() == "half\n"
    assert len(list(tmp_path.glob(".a.tar*"))) == 1
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.slow
def test_an_export_removes_what_killed_ones_have_left_in_its_folder_and_nothing_else(store, tmp_path):
    code = """
        import sys, time
        from pathlib import Path
        from ragfuse.store.archive import new_archive

        with new_archive(Path(sys.argv[1])):
            print("begun", flush=True)
            time.sleep(60)
    """
    away = tmp_path / "away"
    away.mkdir()
    others = {away / ".notes.123.tmp": b"mine", away / ".a.tar.tmp": b"ragfuse-archive.json\0", away / ".b.1.tmp": b""}
    for path, data in others.items():
        path.write_bytes(data)
    killed, alive = child(code, away / "x.tar"), child(code, away / "y.tar")
    try:
        assert [each.stdout.readline() for each in (killed, alive)] == ["begun\n"] * 2
        killed.kill()
        killed.communicate()
        assert (away / f".x.tar.{killed.pid}.tmp").exists()
        bulk.export(store, away / "z.tar")
        assert set(away.iterdir()) == {*others, away / "z.tar", away / f".y.tar.{alive.pid}.tmp"}
    finally:
        alive.kill()
        alive.communicate()


def test_an_export_of_nothing_replaces_no_archive(store, archive):
    before = archive.read_bytes()
    store.clear()
    with pytest.raises(StoreError, match="was not replaced"):
        bulk.export(store, archive)
    assert archive.read_bytes() == before


# media that lie


def test_a_chunk_that_is_mostly_a_hole_takes_no_memory(tmp_path):
    meta, blobs = encoded(kv(0))
    text = meta.sealed(blobs).to_json().replace(f'"nbytes": {meta.layers[0].nbytes}', f'"nbytes": {1 << 43}', 1)
    head = pack_header(KEYS[0], Told(text))
    size, good = Header.parse(head).nbytes, member("ok.kv", entry(KEYS[1], *encoded(kv(1, n=6)))) + bytes(1024)
    path = made(tmp_path / "evil.tar", member("huge.kv", head, size=size), end=False)
    with path.open("r+b") as file:
        file.seek(1024 + 512 + -(-size // 512) * 512)
        file.write(good)
    with KVStore([DiskTier(tmp_path / "wide", 1 << 50, lru)]) as wide:
        with little_memory():
            done = bulk.import_(wide, path)
        assert set(wide.tiers[0].entries()) == {KEYS[1]}
    assert (done.chunks, done.failed) == (1, 1)
    assert "a hole in the file" in done.troubles[0].why


@pytest.mark.parametrize("n_nbytes", [1 << 30, 1 << 43])
def test_a_hole_behind_damage_is_passed_over(empty, tmp_path, monkeypatch, n_nbytes):
    path = made(tmp_path / "evil.tar", b"x" * 512, end=False)
    with path.open("r+b") as file:
        file.seek(n_nbytes)
        file.write(member("ok.kv", entry(KEYS[1], *encoded(kv(1, n=6)))) + bytes(1024))
    n_looks, header = 0, archive_file._header

    def counted(block):
        nonlocal n_looks
        n_looks += 1
        return header(block)

    monkeypatch.setattr(archive_file, "_header", counted)
    done = bulk.import_(empty, path)
    assert (done.chunks, done.failed) == (1, 1)
    assert n_looks < 10
    assert holds(empty, 1)


@pytest.mark.parametrize(
    "text",
    [b"\n" * (8 << 20), b"[" + b"[]," * (2 << 20) + b"[]]\n", b'{"model": [' + b"{}," * (2 << 20) + b"{}]}\n"],
    ids=["lines without end", "lists without number", "objects without number"],
)
def test_texts_take_no_more_memory_than_they_are_long(empty, tmp_path, text):
    path = made(tmp_path / "evil.tar", member("texts/0.jsonl", text))
    with little_memory(4 * len(text)):
        done = bulk.import_(empty, path, take_texts=lambda texts: None)
    assert done.texts == 0


def test_texts_that_are_a_hole_are_left_out(empty, tmp_path):
    path = made(tmp_path / "evil.tar", member("texts/0.jsonl", b"x", size=60 << 20), end=False)
    with path.open("r+b") as file:
        file.seek(1024 + 512 + (60 << 20))
        file.write(bytes(1024))
    with little_memory():
        done = bulk.import_(empty, path, take_texts=lambda texts: None)
    assert (done.texts, done.failed) == (0, 1)


@pytest.mark.parametrize("text", lies().values(), ids=lies().keys())
def test_a_head_that_says_what_is_not_so_is_left_out(empty, tmp_path, text):
    good = member("ok.kv", entry(KEYS[1], *encoded(kv(1, n=6))))
    path = made(tmp_path / "evil.tar", member("x.kv", packed(KEYS[0], text)), good)
    with little_memory():
        done = bulk.import_(empty, path)
    assert (done.chunks, done.failed) == (1, 1)
    assert holds(empty, 1)


@pytest.mark.parametrize("text", ['"', "\\", "{[,:", "\u2028\n\r\0", "a" * 100_000, "\U0001f600"])
def test_any_text_comes_back(store, empty, tmp_path, text):
    taken = []
    bulk.export(store, tmp_path / "a.tar", KEYS, [TEXTS[0]._replace(text=text, source=text[:9])])
    assert bulk.import_(empty, tmp_path / "a.tar", take_texts=taken.extend).texts == 1
    assert taken == [TEXTS[0]._replace(text=text, source=text[:9])]
