"""Measure a model's drift: what a prompt adds, on average, to chunks that were encoded behind
filler text.

Prompts are six passages of SQuAD's training articles and a question, as in the benchmarks; held-out
articles are left out. The drift goes into the folder of a model of one's own, or into the adapter's
for the one that comes along.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from ragfuse.calibration.case import Case
from ragfuse.calibration.methods import Lab, Method
from ragfuse.fuse.rope import Rope, part_layout, shifted
from ragfuse.hf.model import HFModel
from ragfuse.models import MANIFEST
from ragfuse.models.adapters import DRIFT_NAME
from ragfuse.models.loader import load_model
from ragfuse.settings import Settings
from ragfuse.telemetry.progress import progress
from ragfuse.types.kv import ChunkKV, LayerKV
from training.data import Source, split, squad

PASSAGES = 6
FILLER = 256
"""Tokens of other text that chunks are encoded behind by default."""


def drawn(sources: Sequence[Source], count: int, seed: int = 0) -> Iterator[Case]:
    """So many prompts over passages drawn at random, each with a question about one of them."""
    rng = random.Random(seed)
    asked = [source for source in sources if source.questions]
    for index in range(count):
        chosen = [gold := rng.choice(asked)]
        chosen += rng.sample([source for source in sources if source is not gold], PASSAGES - 1)
        rng.shuffle(chosen)
        question = rng.choice(gold.questions)
        yield Case(
            "drift",
            str(index),
            question.question,
            (question.answer,),
            tuple(s.passage.text for s in chosen),
        )


def pairs(model: HFModel, cases: Iterable[Case]) -> Iterator[tuple[ChunkKV, ChunkKV, Tensor]]:
    """Of every case: KV of plain reuse behind filler text, of full prefill, and the rows of chunks
    but the first.
    """
    lab, method = Lab(model, Settings(filler_tokens=FILLER)), Method("none", 0.0, "filler")
    for case in cases:
        lab.hold(case, [method])
        prompt = lab.prompt(case)
        placed = zip(prompt.segments, prompt.spans, strict=True)
        chunks = [torch.arange(lo, hi) for segment, (lo, hi) in placed if segment.kind == "chunk"]
        yield (
            lab.prefill(method, prompt).kv,
            model.full_prefill(prompt.token_ids).kv,
            torch.cat(chunks[1:]),
        )
    lab.close()


def measured(pairs: Iterable[tuple[ChunkKV, ChunkKV, Tensor]], rope: Rope) -> ChunkKV:
    """Return the drift: the mean of wanted - found over the given rows of all prompts, before
    rotation.

    Args:
        pairs: (found, wanted, rows) per prompt, at positions 0..T-1. found: KV with chunks encoded
            behind filler text; wanted: KV by full prefill; rows: int64 [n], the rows of those
            chunks.
        rope: The rotation of each layer; None where keys carry no position.

    Returns:
        float32, one row per layer, at position 0.

    Raises:
        ValueError: There is no row to measure on.
    """
    total: list[LayerKV] | None = None
    count = 0
    for found, wanted, rows in pairs:
        back = -rows.double()[:, None]
        differences = []
        for found_layer, wanted_layer, layout in zip(
            found.layers, wanted.layers, rope, strict=True
        ):
            parts = (
                ("keys", found_layer.keys, wanted_layer.keys),
                ("values", found_layer.values, wanted_layer.values),
            )
            keys, values = (
                shifted(
                    (b[:, rows].float() - a[:, rows].float()), back, part_layout(layout, name)
                ).sum(1, keepdim=True)
                for name, a, b in parts
            )
            differences.append(LayerKV(keys, values))
        sums = zip(total, differences, strict=True) if total is not None else ()
        total = [LayerKV(a.keys + b.keys, a.values + b.values) for a, b in sums] or differences
        count += len(rows)
    if total is None or not count:
        raise ValueError("A drift is measured on at least one row (a token), found none.")
    return ChunkKV(tuple(LayerKV(layer.keys / count, layer.values / count) for layer in total))


def write_drift(folder: Path, drift: ChunkKV) -> None:
    """Write a drift to the folder of its model, where `load_model` finds it."""
    named = {f"keys.{i}": layer.keys for i, layer in enumerate(drift.layers)}
    named |= {f"values.{i}": layer.values for i, layer in enumerate(drift.layers)}
    save_file({name: part.contiguous() for name, part in named.items()}, folder / DRIFT_NAME)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", required=True, help="Folder of the model; a drift that it has is not used."
    )
    parser.add_argument("--squad", type=Path, required=True, help="SQuAD 2.0 JSON.")
    parser.add_argument(
        "--out", type=Path, required=True, help="Folder that the drift is written to."
    )
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--dtype", default="bfloat16")
    chosen = parser.parse_args()
    if (chosen.out / MANIFEST).exists():
        parser.error(
            f"{chosen.out} was prepared by ragfuse, which would make it anew: give the adapter's"
            " folder."
        )
    loaded = load_model(chosen.model, chosen.dtype)
    model = HFModel(loaded.model, loaded.tokenizer)
    articles, _ = split(squad(chosen.squad))
    cases = list(
        drawn([source for sources in articles.values() for source in sources], chosen.prompts)
    )
    with progress(Console(stderr=True)) as bar:
        found = measured(pairs(model, bar.track(cases, description="prompts")), model.profile.rope)
    write_drift(chosen.out, found)


if __name__ == "__main__":
    main()
