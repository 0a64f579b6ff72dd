"""Tiny random models of many families, and prompts over them.

Weights are drawn wide, norms and biases too, so that attention is sharp and nothing is one by
accident: what is off by one position, or masked wrongly, changes the answer by percents.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.decode import Member
from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel, KVSource, Prefill
from ragfuse.types.kv import ChunkKV
from tests.kits.families import BASE, FAMILIES, HYBRIDS, REFUSED, VOCABULARY
from tests.twins.reference import prefill_by_hand

DEVICE = torch.device(os.environ.get("RAGFUSE_DEVICE", "cpu"))
"""Where the tests of models run: `make test-gpu` runs them on a GPU."""
EXACT = 5e-6
"""Relative error in float32; what is wrong is off by percents."""


def build(
    kind: str, options: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A random model of a family, wide weights."""
    given = {name: value for name, value in {**BASE, **options}.items() if value is not None}
    config = AutoConfig.for_model(kind, **copy.deepcopy(given))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    widen(model)
    model = model.to(dtype).eval()
    return model if DEVICE.type == "cpu" else model.to(DEVICE)


def widen(model: PreTrainedModel) -> None:
    """Draw every matrix so that its output is as large as its input, and every norm and bias around
    its value.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                weight.add_(0.2 * torch.randn_like(weight))
            elif "embed" in name or "wte" in name:
                weight.normal_(0.0, 1.0)
            else:
                weight.normal_(0.0, 1.2 * weight.shape[-1] ** -0.5)


@cache
def family(name: str, dtype: torch.dtype = torch.float32, accelerated: bool = False) -> HFModel:
    """The model of that name, probed; shared by all tests, so none may change it.

    Args:
        name: Of the family.
        dtype: Of its weights.
        accelerated: Whether it fuses prompts as on an accelerator.
    """
    if accelerated:
        model = twin(family(name, dtype))
        model.accelerated = True
        return model
    kind, options = (FAMILIES.get(name) or REFUSED.get(name) or HYBRIDS[name])[:2]
    return HFModel(build(kind, options, dtype=dtype), tokenizer())


def twin(model: HFModel) -> HFModel:
    """A second object over the same model, whose attributes may be changed."""
    made: HFModel = object.__new__(HFModel)
    vars(made).update(vars(model))
    return made


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """256 ids, all ASCII letters among them; each id one visible character."""
    alphabet = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for code in range(3, VOCABULARY):
        alphabet[chr(0x4E00 + code) if code >= 0x7F or code < 0x20 else chr(code)] = code
    made = Tokenizer(models.WordLevel(alphabet, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def tensor(values: object) -> Tensor:
    """A tensor on the device of the models."""
    return torch.tensor(values, device=DEVICE)


def ids(count: int, seed: int = 0) -> list[int]:
    """Random tokens, no special ones."""
    return torch.randint(
        3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


@dataclass(frozen=True)
class Scene:
    """A prompt of parts, each (ids, "prefix" | "chunk" | "miss" | "fresh"), placed at `starts`."""

    parts: tuple[tuple[tuple[int, ...], str], ...]
    starts: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        return [token for part, _ in self.parts for token in part]

    @property
    def positions(self) -> Tensor:
        spans = zip(self.starts, self.parts, strict=True)
        return torch.cat([torch.arange(start, start + len(part)) for start, (part, _) in spans])

    @property
    def runs(self) -> list[CachedRun]:
        runs, lo = [], 0
        for index, (start, (part, kind)) in enumerate(zip(self.starts, self.parts, strict=True)):
            if kind in ("prefix", "chunk"):
                runs.append(CachedRun(index, lo, lo + len(part), start, blend=kind == "chunk"))
            lo += len(part)
        return runs

    @property
    def by_hand(self) -> list[tuple[tuple[int, ...], bool]]:
        """(ids, cached?) per part, for the twin; the last row is never cached."""
        parts = [(part, kind in ("prefix", "chunk")) for part, kind in self.parts]
        last, cached = parts[-1]
        return [*parts[:-1], (last[:-1], True), (last[-1:], False)] if cached else parts


def scene(
    sizes: Sequence[int], kinds: Sequence[str], gaps: Sequence[int] | None = None, seed: int = 0
) -> Scene:
    """Parts of random tokens; `gaps` free positions before each."""
    tokens, parts, starts, at = ids(sum(sizes), seed), [], [], 0
    for size, kind, gap in zip(sizes, kinds, gaps or [0] * len(sizes), strict=True):
        parts.append((tuple(tokens[:size]), kind))
        tokens, at = tokens[size:], at + gap
        starts.append(at)
        at += size
    return Scene(tuple(parts), tuple(starts))


def usual(seed: int = 0) -> Scene:
    """A prefix, three chunks, a question: 71 tokens, longer than every tiny window."""
    return scene([7, 17, 24, 16, 7], ["prefix", "chunk", "chunk", "chunk", "fresh"], seed=seed)


def source(model: HFModel, scene: Scene) -> KVSource:
    """Every part's KV, by its number."""
    return KVSource([model.encode(part) for part, _ in scene.parts])


def fuse(
    model: HFModel, scene: Scene, policy: str, ratio: float, kv: KVSource | None = None
) -> Prefill:
    """One fused prefill of a scene, its chunks encoded on the way unless given."""
    kv = kv or source(model, scene)
    return model.fuse(scene.token_ids, scene.positions, scene.runs, kv, policy, ratio)


def together(model: HFModel, calls: Sequence[tuple[Prefill, dict[str, Any]]]) -> list[list[int]]:
    """What each of several `generate` writes, in threads; none decodes before all have begun.

    calls: (prefill, arguments of `generate`) of each.
    """
    begun, register = threading.Barrier(len(calls)), model.batcher.member

    @contextmanager
    def member(*arguments: Any) -> Iterator[Member | None]:
        with register(*arguments) as each:
            begun.wait(60)
            yield each

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(calls)) as pool:
        patch.setattr(model.batcher, "member", member)
        return list(pool.map(lambda call: generate(model, call[0], **call[1]), calls))


def states(of: Prefill | ChunkKV) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [H, T, D] of every layer."""
    kv = of.kv if isinstance(of, Prefill) else of
    return [(layer.keys, layer.values) for layer in kv.layers]


def off(found: Tensor, wanted: Tensor) -> float:
    """Relative error, root mean square."""
    found, wanted = found.double().cpu(), wanted.double().cpu()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))


def worst(found: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Largest relative error over the keys and values of all layers."""
    pairs = zip(found, wanted, strict=True)
    return max(
        off(new, old) for mine, theirs in pairs for new, old in zip(mine, theirs, strict=True)
    )


def apart(found: Prefill | ChunkKV, wanted: Prefill | ChunkKV) -> float:
    """Largest relative error over the KV of two prefills or runs; 0.0 if they are equal."""
    return worst(states(found), states(wanted))


def assert_same(found: Prefill, wanted: Prefill, bound: float = EXACT) -> None:
    """Logits and KV of two prefills are the same."""
    assert off(found.logits, wanted.logits) < bound
    assert apart(found, wanted) < bound


def assert_reuse(found: Prefill, model: HFModel, scene: Scene, bound: float = EXACT) -> None:
    """A prefill is what the slow twin has, which places the scene's cached parts by hand."""
    logits, kv = prefill_by_hand(model.model, scene.by_hand, scene.positions.tolist())
    assert off(found.logits, logits) < bound
    assert worst(states(found), kv) < bound


def copied(chunk: ChunkKV) -> list[tuple[Tensor, Tensor]]:
    """A snapshot of stored tensors."""
    return [(layer.keys.clone(), layer.values.clone()) for layer in chunk.layers]


def greedy(length: int, **options: Any) -> dict[str, Any]:
    """Options of an answer of that many of the likeliest tokens."""
    told = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return {**told, **options}


def theirs(
    model: HFModel, tokens: Sequence[int], options: Mapping[str, Any], seed: int = 0
) -> list[int]:
    """What transformers writes by itself behind these tokens."""
    torch.manual_seed(seed)
    told = {"pad_token_id": 0, **options}
    return model.model.generate(tensor([list(tokens)]), **told)[0, len(tokens) :].tolist()
