"""A Redis server whose rows and keys lie: each lie is a miss that is dropped, or a stranger's that is left alone, and
the tier goes on."""

import json

import pytest
from blake3 import blake3

from ragfuse.types.keys import FORMAT_VERSION
from tests.store.kit import encoded, key, kv
from tests.store.lies import lies, little_memory
from tests.store.redis_server import chunk_name

A, B, C = key("a"), key("b"), key("c")
PREFIX = f"ragfuse:{FORMAT_VERSION}:"
ROWS = f"{PREFIX}rows"


def is_sound(tier, unit) -> bool:
    """Whether entries are written, found, read, pinned, deleted and counted."""
    for each in (B, C):
        assert tier.write(each, *encoded(kv()))
        assert tier.read(each, 0, 3) is not None
    tier.pin([B], True)
    tier.touch([C])
    assert set(tier.entries()) == {B, C}
    assert tier.delete([C]) == 1
    return (tier.nbytes, tier.n_entries) == (unit, 1)


LYING = {
    "3e7 layers": "900 0 0 1.0 5 30000000 raw=900",
    "3e7 layers, and bytes for them": "90000000 0 0 1.0 5 30000000 raw=90000000",
    "numbers below none": "900 0 -1 1.0 5 3 raw=900",
    "tokens below none": "900 0 0 1.0 -5 3 raw=900",
    "no tokens": "900 0 0 1.0 0 3 raw=900",
    "more bytes than digits": f"{'9' * 30} 0 0 1.0 5 3 raw={'9' * 30}",
    "more bytes than any medium": "999999999999999 0 0 1.0 5 3 raw=999999999999999",
    "more hits than digits": f"900 0 {'9' * 400} 1.0 5 3 raw=900",
    "used at infinity": "900 0 0 inf 5 3 raw=900",
    "used never": "900 0 0 nan 5 3 raw=900",
    "used in no time": "900 0 0 1e308 5 3 raw=900",
    "digits of another script": "٩٠٠ 0 0 1.0 5 3 raw=900",
    "pinned to nothing": "900 7 0 1.0 5 3 raw=900",
    "levels without end": "900 0 0 1.0 5 3 " + " ".join(f"l{i}=1" for i in range(5000)),
    "a text": "hello",
    "nothing": "",
    "bytes": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("row", LYING.values(), ids=LYING.keys())
def test_a_row_that_lies_is_dropped_and_counted_and_costs_no_room(open_tier, raw, unit, row):
    tier = open_tier(3 * unit)
    raw.hset(ROWS, str(A), row)
    with little_memory():
        assert A not in tier.entries([A])
        assert A not in tier.entries()
        assert tier.read(A, 0, 3) is None
    assert tier.counts["corrupt"] == 1
    assert raw.hget(ROWS, str(A)) is None
    assert is_sound(tier, unit)
    assert tier.counts["failed"] == 0


@pytest.mark.parametrize("row", LYING.values(), ids=LYING.keys())
def test_a_row_that_lies_does_not_keep_others_from_their_room(open_tier, raw, unit, row):
    """Never looked up, it stands first in the order of use, and is met where room is made."""
    tier = open_tier(3 * unit)
    raw.hset(ROWS, str(A), row)
    raw.zadd(f"{PREFIX}used", {str(A): 0})
    for number in range(6):
        assert tier.write(key(number), *encoded(kv()))
    assert {key(4), key(5)} <= set(tier.entries())
    assert tier.nbytes <= 3 * unit
    tier.tidy()
    assert tier.nbytes == sum(entry.nbytes for entry in tier.entries().values())


@pytest.mark.parametrize("name", [b"", b"\xff\xfe", b"no key", b"a.b", b"x" * 100_000])
def test_a_row_of_no_key_is_dropped(open_tier, raw, unit, name):
    tier = open_tier(3 * unit)
    raw.hset(ROWS, name or b"?", f"{unit} 0 0 1.0 5 3 raw={unit}")
    assert tier.entries() == {}
    assert is_sound(tier, unit)


@pytest.mark.parametrize("field", ["", "#"])
@pytest.mark.parametrize("value", ["many", "1e300", "-5", "9" * 40, ""])
def test_a_sum_that_is_no_number_is_made_anew(open_tier, raw, unit, field, value):
    tier = open_tier(3 * unit)
    assert tier.write(A, *encoded(kv()))
    raw.hset(ROWS, field, value)
    assert tier.write(B, *encoded(kv()))
    assert tier.write(C, *encoded(kv()))
    assert tier.write(key("d"), *encoded(kv()))
    assert tier.nbytes <= 3 * unit
    assert B in tier.entries()
    tier.tidy()
    assert (tier.nbytes, tier.n_entries) == (unit * len(tier.entries()), len(tier.entries()))
    assert tier.counts["failed"] == 0


KINDS = {
    "a list": lambda raw, name: raw.rpush(name, "mine"),
    "a text": lambda raw, name: raw.set(name, "mine"),
    "a set": lambda raw, name: raw.sadd(name, "mine"),
    "an order": lambda raw, name: raw.zadd(name, {"mine": 1}),
    "a stream": lambda raw, name: raw.xadd(name, {"mine": 1}),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_key_of_another_kind_in_place_of_an_entry_is_a_miss(open_tier, raw, unit, kind):
    tier = open_tier(3 * unit)
    assert tier.write(A, *encoded(kv()))
    raw.delete(chunk_name(A))
    kind(raw, chunk_name(A))
    assert tier.read(A, 0, 3) is None
    assert (tier.counts["corrupt"], tier.entries()) == (1, {})
    assert is_sound(tier, unit)


STRANGE = [f"{PREFIX}chunk:", f"{PREFIX}chunk:mine", f"{PREFIX}chunk:a.b.c", f"{PREFIX}new:mine", f"{PREFIX}mine"]


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("kind", [*KINDS, "a hash"])
def test_keys_of_others_under_the_same_prefix_are_left_alone_and_not_counted(open_tier, raw, unit, name, kind):
    tier = open_tier(3 * unit)
    if kind == "a hash":
        raw.hset(name, "mine", "1")
    else:
        KINDS[kind](raw, name)
    freed = tier.tidy()
    assert (freed.orphans, freed.nbytes) == (0, 0)
    assert tier.delete([A]) == 0
    assert raw.exists(name)
    assert tier.nbytes == 0
    assert is_sound(tier, unit)


def with_meta(head: bytes, text: str) -> bytes:
    fields = {**json.loads(head[32:]), "meta": text}
    packed = json.dumps(fields).encode()
    return blake3(packed).digest() + packed


@pytest.mark.parametrize("text", lies().values(), ids=lies().keys())
def test_a_head_that_says_what_is_not_so_is_dropped_and_counted(open_tier, raw, unit, text):
    tier = open_tier(3 * unit)
    assert tier.write(A, *encoded(kv()))
    raw.hset(chunk_name(A), "head", with_meta(raw.hget(chunk_name(A), "head"), text))
    with little_memory():
        assert tier.read(A, 0, 3) is None
    assert tier.counts["corrupt"] == 1
    assert A not in tier.entries([A])
    assert is_sound(tier, unit)


def test_a_head_of_many_megabytes_is_not_looked_into(open_tier, raw, unit):
    tier = open_tier(3 * unit)
    assert tier.write(A, *encoded(kv()))
    text = b"[" + b"1," * (8 << 20) + b"1]"
    raw.hset(chunk_name(A), "head", blake3(text).digest() + text)
    assert tier.read(A, 0) is None
    assert tier.counts["corrupt"] == 1
    assert is_sound(tier, unit)


def test_room_that_nobody_takes_is_nobody_s(open_tier, raw, unit):
    """Uploads under way that are no uploads, and entries due that are none."""
    tier = open_tier(2 * unit)
    raw.zadd(f"{PREFIX}writing", {"9" * 40 + ":x": 4e9, "mine": 4e9, f"{'9' * 400}": 4e9})
    raw.zadd(f"{PREFIX}due", {"mine": 1, "\xff": 2})
    assert tier.nbytes == 0
    assert is_sound(tier, unit)
