"""Coverage-guided fuzzing of what unpacks layers: python -m tests.codec.fuzz [libFuzzer options] CORPUS. Needs atheris.

The checksum is made to match, so that what lies behind it is reached. Anything but a ValueError, a shape that was not
asked for, and a layer that takes seconds is a find.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ragfuse.codec"]):
    from ragfuse.codec import PAPER, CacheGenCodec, LayerMeta, UniformCodec, codec_for
    from ragfuse.types.levels import LEVEL_NAMES
    from tests.codec.kit import layer, resum, tables

import torch

KNOWN, BEFORE = tables(), layer(n=30)
CODECS = [*(codec_for(level, KNOWN) for level in LEVEL_NAMES[1:]), UniformCodec(3), CacheGenCodec(KNOWN, PAPER)]
META = LayerMeta.of(BEFORE, torch.zeros(1))


def one(data: bytes) -> None:
    """Every codec looks at the same bytes, but for what says whose they are."""
    blob = bytearray(data)
    for codec in CODECS:
        resum(blob, codec)
        try:
            after = codec.decode(torch.frombuffer(blob or bytearray(1), dtype=torch.uint8), META)
        except ValueError:
            continue
        assert (after.keys.shape, after.values.shape) == (BEFORE.keys.shape, BEFORE.values.shape)


def seed(folder: Path) -> None:
    """What the codecs themselves write, as a corpus to begin with."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, codec in ((f"{at}-{codec.name}", codec) for at, codec in enumerate(CODECS)):
        (folder / name).write_bytes(codec.encode(BEFORE).numpy().tobytes())


if __name__ == "__main__":
    seed(Path(sys.argv[-1]))
    atheris.Setup([*sys.argv[:-1], "-timeout=5", "-rss_limit_mb=4096", "-max_len=8192", sys.argv[-1]], one)
    atheris.Fuzz()
