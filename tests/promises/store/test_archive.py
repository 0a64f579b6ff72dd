"""Archives: what is exported comes back bit for bit, and a damaged one gives what is whole."""

import random
from zipfile import ZipFile

import pytest

from ragfuse.errors import StoreError
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KnownText, KVStore, MemoryTier
from ragfuse.store.archive import export, import_
from tests.kits.store import files, key, kv, same

MB = 1 << 20
KEYS = [key(i) for i in range(4)]
TEXTS = [
    KnownText(str(KEYS[i]), f'text {i}\n\0é"\\{{[,:\u2028\r\U0001f600', f"{i}.txt")
    for i in range(3)
]


def over(path):
    return KVStore([MemoryTier(MB, lru), DiskTier(path, MB, lru)])


@pytest.fixture
def store(tmp_path):
    with over(tmp_path / "from") as store:
        for i, one in enumerate(KEYS):
            store.put(one, kv(i, n=5 + i), wait=True)
        yield store


@pytest.fixture
def empty(tmp_path):
    with over(tmp_path / "to") as store:
        yield store


@pytest.fixture
def archive(store, tmp_path):
    path = tmp_path / "chunks.zip"
    export(store, path, store.entries(), TEXTS)
    return path


def are_right(store):
    """Return which chunks are in the slow tier; they are as they were."""
    there = {i for i, one in enumerate(KEYS) if store.tiers[1].stat([one])}
    for i in there:
        layers = store.read_layers(KEYS[i], 0, 3, tier="disk")
        assert all(same(*pair) for pair in zip(layers, kv(i, n=5 + i).layers, strict=True))
    return there


def made(path, members):
    """Return an archive of these members."""
    with ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_what_is_exported_comes_back_bit_for_bit_with_its_texts(empty, archive):
    texts, told = [], []
    done = import_(
        empty, archive, take_texts=texts.extend, progress=lambda *numbers: told.append(numbers)
    )
    assert (done.entries, done.known, done.texts) == (4, 0, 3)
    assert (texts, are_right(empty)) == (TEXTS, {0, 1, 2, 3})
    assert told == sorted(told)
    again = import_(empty, archive)
    assert (again.entries, again.known) == (0, 4)
    assert archive.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_exported_is_told_and_replaces_no_whole_archive(store, archive, tmp_path):
    before, entries = archive.read_bytes(), store.tiers[1].list()
    path = next(path for path in files(tmp_path / "from") if store.tiers[1].get(KEYS[0], range(1)))
    path.write_bytes(path.read_bytes()[:-1])
    for some in (entries, []):
        with pytest.raises(StoreError, match="could not be read"):
            export(store, archive, some)
    assert archive.read_bytes() == before
    done = export(store, tmp_path / "some.zip", entries)
    assert (done.entries, done.missing) == (3, 1)
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(StoreError, match="cannot be written"):
        export(store, tmp_path / "none" / "a.zip", entries)


def test_an_archive_larger_than_the_tier_leaves_what_fits_and_tells_the_rest(archive, tmp_path):
    with KVStore([DiskTier(tmp_path / "small", 6000, lru)]) as store:
        with pytest.raises(StoreError, match="are not in tier"):
            import_(store, archive)
        assert store.entries() != []


def test_a_damaged_archive_is_refused_and_gives_only_what_is_whole(archive, tmp_path):
    whole, chance = archive.read_bytes(), random.Random(3)
    bad = tmp_path / "bad.zip"
    for round_ in range(60):
        at = chance.randrange(len(whole))
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with over(tmp_path / f"to{round_}") as store:
            try:
                done = import_(store, bad)
                assert done.entries == len(are_right(store)) == len(KEYS)
            except StoreError:
                are_right(store)
            bad.write_bytes(whole[:at])
            with pytest.raises(StoreError, match="cannot be imported"):
                import_(store, bad)


def test_a_file_that_is_no_archive_is_refused(empty, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"words" * 200)
    for each in (path, tmp_path, tmp_path / "none"):
        with pytest.raises(StoreError, match="cannot be imported"):
            import_(empty, each)


@pytest.mark.parametrize(
    "member", [("../escaped", b"words"), ("/abs.kv", b""), ("texts.jsonl", b"[1]")]
)
def test_other_members_make_no_file_and_are_refused(empty, tmp_path, member):
    odd = made(tmp_path / "odd.zip", dict([member]))
    with pytest.raises(StoreError, match="cannot be imported"):
        import_(empty, odd)
    assert not (tmp_path.parent / "escaped").exists()
