"""The student is the engine at ratio 0, the teacher is full prefill: token by token, one question
at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ragfuse import Ask, Engine, Piece, Settings
from ragfuse.adapt.teacher import context_of
from ragfuse.engine.request import ends_of
from ragfuse.errors import RefusedError
from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.branches import Branch, BranchModel, ContextTokens
from ragfuse.hf.chunk_adapter import LoraAdapter
from ragfuse.hf.model import KVSource, Prefill
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.loader import load_model
from ragfuse.plan.evict import lru
from ragfuse.store import KVStore, MemoryTier
from ragfuse.types.kv import ChunkKV
from ragfuse.types.prompt import Prompt
from tests.kits import hf as kit
from tests.kits.families import FAMILIES
from tests.kits.tiny import CHUNKS, INSTRUCTION
from tests.promises.hf.test_chunk_adapter import filled

ANSWERS = {
    "Question: Who counted ships?": (70, 71, 72),
    "What is white?": (80,),
    "Which doors are there, and of what colour is each?": (90, 91),
}
REFUSED_HERE = ("window", "alibi", "latent", "two-ropes")


def opened(path: Path, **told: object) -> Engine:
    """An engine over weights that can be trained."""
    settings = Settings(model=str(path), dtype="float32", prefix_cache=False, learn="off", **told)
    model = load_model(path, "float32", pack=False)
    return Engine(settings, model, KVStore([MemoryTier(1 << 28, lru)]))


def asked(engine: Engine) -> tuple[list[Prompt], ContextTokens, list[Branch]]:
    """Three questions over the same chunks: prompts, what they begin with, how each goes on."""
    chunks = [part for text in CHUNKS[:4] for part in (Piece(text, "chunk"), Piece("\n\n"))]
    prompts = [
        engine.prompt([("user", [Piece(INSTRUCTION), *chunks, Piece(question)])])
        for question in ANSWERS
    ]
    context = context_of(prompts[0])
    count = len(context.token_ids)
    assert all(prompt.token_ids[:count] == context.token_ids for prompt in prompts)
    told = zip(prompts, ANSWERS.values(), strict=True)
    return prompts, context, [Branch(each.token_ids[count:], said) for each, said in told]


def branches_of(engine: Engine, adapter: LoraAdapter | None = None) -> BranchModel:
    model = engine.model
    return BranchModel(model.model, model.profile, engine.runtime.encoder.filler(160), adapter)


def reused(engine: Engine, prompts: Sequence[Prompt]) -> list[Prefill]:
    """What the engine prepares of cached chunks alone."""
    engine.ingest([(text, "book") for text in CHUNKS[:4]])
    prepared = [engine.prepare(each, Ask(policy="none", ratio=0.0)) for each in prompts]
    assert not any(each.plan.misses for each in prepared)
    return [each.prefill for each in prepared]


def full(engine: Engine, prompts: Sequence[Prompt]) -> list[Prefill]:
    return [engine.model.full_prefill(prompt.token_ids) for prompt in prompts]


def scored(engine: Engine, prefills: Sequence[Prefill], branches: Sequence[Branch]) -> Tensor:
    pairs = zip(prefills, branches, strict=True)
    return torch.cat([engine.model.score_continuation(each, to.answer) for each, to in pairs])


def assert_close(found: object, wanted: object, error: float = 1e-4) -> None:
    torch.testing.assert_close(found, wanted, rtol=error, atol=error)


def test_with_a_chunk_adapter_the_student_is_the_engine_that_has_it(tiny_path, tmp_path):
    with opened(tiny_path, filler_tokens=40) as engine:
        _, context, each = asked(engine)
        before = engine.model.full_prefill(context.token_ids).logits
        adapter = filled(LoraAdapter(engine.model.model, 4, 0, str(tiny_path)))
        adapter.save(tmp_path / CHUNK_ADAPTER)
        model = branches_of(engine, adapter)
        student = model.blockwise(context, each, (1,))
        _, taught = model.taught(
            context, [b.question for b in each], 3, (), (1,), [b.answer for b in each]
        )
        teacher = taught.logits
        student.logits.square().mean().backward()
        assert not teacher.requires_grad
    # the gradients reach it through the chunks alone: of the last layer only their KV is read
    unread = ("q_proj", "o_proj", "mlp")
    for name, weight in adapter.weights.items():
        is_read = "layers.2." not in name or not any(part in name for part in unread)
        assert is_read == (weight.grad is not None and bool(weight.grad.any())), name
    with opened(tmp_path, filler_tokens=40) as engine:
        prompts, _, _ = asked(engine)
        wanted = reused(engine, prompts)
        assert_close(student.logits, scored(engine, wanted, each))
        assert_close(teacher, scored(engine, full(engine, prompts), each))
        assert_close(taught.logits, teacher)
        assert not torch.allclose(student.logits, teacher, atol=1e-2)
        plain = engine.model.full_prefill(context.token_ids)
        assert torch.equal(plain.logits, before)
    rows = [row for lo, hi in context.chunks for row in range(lo, hi)]
    assert 0 < len(rows) < len(context.token_ids)

    def of_chunks(kv: ChunkKV) -> list[tuple[Tensor, Tensor]]:
        return [(keys[:, rows], values[:, rows]) for keys, values in kit.states(kv)]

    assert_close(taught.chunks, of_chunks(plain.kv))
    assert_close(student.chunks, of_chunks(wanted[0].kv))


def test_answers_are_written_side_by_side_as_apart(varied_path):
    with opened(varied_path) as engine:
        prompts, context, each = asked(engine)
        model = BranchModel(engine.model.model, engine.model.profile, ())
        questions, ends = [branch.question for branch in each], {*ends_of(engine.model), 100}
        branches, states = model.taught(context, questions, 9, ends, (2,))
        for branch, prompt in zip(branches, prompts, strict=True):
            ids, wanted = list(prompt.token_ids), list[int]()
            while len(wanted) < 9 and not ends & {*wanted}:
                wanted.append(int(engine.model.full_prefill([*ids, *wanted]).logits.argmax()))
            assert list(branch.answer) == wanted
        again, same = model.taught(
            context, questions, 9, ends, (2,), [branch.answer for branch in branches]
        )
        assert again == branches
        assert_close(same.logits, states.logits, 1e-5)


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.endswith(REFUSED_HERE)])
def test_the_student_is_reuse_in_other_families(family):
    hf, ids = kit.family(family), kit.ids(90, 1)
    context, filler = ContextTokens(tuple(ids[:70]), ((5, 30), (33, 70))), ids[:20]
    model = BranchModel(hf.model, hf.profile, filler)
    student = model.blockwise(context, [Branch(tuple(ids[70:]), (7,))]).logits
    runs = [
        CachedRun(index, lo, hi, lo, blend=True) for index, (lo, hi) in enumerate(context.chunks)
    ]
    source = KVSource([hf.encode(ids[lo:hi], filler) for lo, hi in context.chunks])
    wanted = hf.fuse(ids, torch.arange(90), runs, source, "none", 0.0).logits
    torch.testing.assert_close(student[0], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("mistral-window", "sliding window of 20"),
        ("gemma3-two-ropes", "sliding window of 20"),
        ("falcon-alibi", "ALiBi"),
        ("bloom-alibi", "ALiBi"),
        ("mpt-alibi", "ALiBi"),
        ("deepseek-latent", "MLA"),
    ],
)
def test_a_family_whose_attention_a_mask_over_chunks_cannot_hold_is_refused(family, found):
    hf = kit.family(family)
    with pytest.raises(RefusedError, match=found):
        BranchModel(hf.model, hf.profile, ())
