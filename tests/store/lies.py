"""Entries that say what is not so, their checksums right: what a hostile medium may hold."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from ragfuse.store.chunkfile import pack_header, pieces
from tests.store.kit import encoded, kv

MOST_ASKED = 32 << 20
"""Bytes that reading a lie may take: what says to be gigabytes takes gigabytes where it is believed."""


@contextmanager
def little_memory(most: int = MOST_ASKED) -> Iterator[None]:
    """At most so many bytes more are taken in the block at any time, by Python and by tensors that it fills."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - before <= most


def lies() -> dict[str, str]:
    """Descriptions of entries, as JSON text, by what is wrong with them."""
    meta, blobs = encoded(kv())
    told = json.loads(meta.sealed(blobs).to_json())
    layer = told["layers"][0]
    tiny = {"key_shape": [1, 5, 1], "value_shape": [1, 5, 1], "dtype": "float16", "nbytes": 1, "checksum": ""}

    def said(**changes) -> str:
        return json.dumps({**told, **changes})

    return {
        "800,000 layers": '{"version": 2, "n_tokens": 5, "levels": ["raw"], "layers": ['
        + ",".join(["{}"] * 800_000)
        + "]}",
        "9,000 layers": said(layers=[tiny] * 9000),
        "a billion numbers in a few bytes": said(layers=[{**layer, "key_shape": [1, 5, 10**9]}] * 3),
        "shapes beyond any number": said(layers=[{**layer, "key_shape": [2**62, 5, 2**62]}] * 3),
        "a negative shape": said(layers=[{**layer, "key_shape": [-2, 5, -8]}] * 3),
        "a layer of a petabyte": said(layers=[{**layer, "nbytes": 1 << 50}] * 3),
        "lists in lists": "[" * 200_000,
        "objects in objects": '{"a":' * 200_000,
        "a number of a million digits": '{"version": ' + "9" * 1_000_000 + "}",
        "tokens that are no number": '{"version": 2, "n_tokens": NaN, "levels": ["raw"], "layers": [{}]}',
        "levels that are none": said(levels=[1]),
        "layers that are a text": said(layers="{}" * 3),
        "nothing": "null",
    }


class Told:
    """Stands for a description that says just this."""

    def __init__(self, text: str) -> None:
        self._text = text

    def to_json(self) -> str:
        return self._text


def packed(key, text: str) -> bytes:
    """A chunk file with this description, and the layers of an honest one."""
    return b"".join(map(bytes, pieces(pack_header(key, Told(text)), encoded(kv())[1])))
