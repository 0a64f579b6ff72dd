"""The student is the engine at ratio 0, the teacher is full prefill: token by token, one question
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from ragfuse import Ask, Engine, Piece, Settings
from ragfuse.adapt.teacher import context_of
from ragfuse.engine.options import ends_of
from ragfuse.errors import RefusedError
from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.branches import Branch, BranchModel, ContextTokens
from ragfuse.hf.lora import LoraAdapter
from ragfuse.hf.model import KVSource
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.loader import load_model
from ragfuse.plan.evict import lru
from ragfuse.store import KVStore, MemoryTier
from ragfuse.types.prompt import Prompt
from tests.hf import kit
from tests.hf.families import FAMILIES
from tests.hf.test_lora import filled
from tests.tiny import CHUNKS, INSTRUCTION

QUESTIONS = (
    "Question: Who counted ships?",
    "What is white?",
    "Which doors are there, and of what colour is each?",
)
REFUSED_HERE = ("window", "alibi", "latent", "two-ropes")


def prompts(engine: Engine, chunks: Sequence[str] = CHUNKS[:4]) -> list[Prompt]:
    def messages(question: str) -> list[tuple[str, list[Piece]]]:
        parts = [part for text in chunks for part in (Piece(text, "chunk"), Piece("\n\n"))]
        return [("user", [Piece(INSTRUCTION), *parts, Piece(question)])]

    return [engine.prompt(messages(question)) for question in QUESTIONS]


@pytest.fixture(scope="module")
def engine(tiny_path: Path) -> Iterator[Engine]:
    """An engine over weights that can be trained."""
    settings = Settings(model=str(tiny_path), dtype="float32", prefix_cache=False, learn="off")
    with Engine(
        settings, load_model(tiny_path, "float32", pack=False), KVStore([MemoryTier(1 << 28, lru)])
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def branches(engine: Engine) -> BranchModel:
    """Its forwards, with a new adapter beside it, which changes nothing."""
    LoraAdapter(engine.model.model, 4, 0, "tiny")
    return BranchModel(engine.model.model, engine.model.profile, engine.runtime.encoder.filler(160))


def asked(found: Sequence[Prompt]) -> tuple[ContextTokens, list[Branch]]:
    context = context_of(found[0])
    count = len(context.token_ids)
    assert all(prompt.token_ids[:count] == context.token_ids for prompt in found)
    answers = ((70, 71, 72), (80,), (90, 91))
    return context, [
        Branch(p.token_ids[count:], said) for p, said in zip(found, answers, strict=True)
    ]


def test_the_student_is_the_engine_with_nothing_recomputed(
    engine: Engine, branches: BranchModel
) -> None:
    found = prompts(engine)
    context, each = asked(found)
    engine.ingest([(text, "book") for text in CHUNKS[:4]])
    wanted = []
    for prompt, branch in zip(found, each, strict=True):
        prepared = engine.prepare(prompt, Ask(policy="none", ratio=0.0))
        assert [segment.kind for segment in prompt.segments].count("chunk") == 4
        assert not prepared.plan.misses
        wanted.append(engine.model.score_continuation(prepared.prefill, branch.answer))
    logits = branches.blockwise(context, each).logits
    torch.testing.assert_close(logits, torch.cat(wanted), rtol=1e-4, atol=1e-4)


def test_with_a_chunk_adapter_the_student_is_the_engine_that_has_it(
    tiny_path: Path, tmp_path: Path
) -> None:
    settings = Settings(
        model=str(tiny_path), dtype="float32", prefix_cache=False, learn="off", filler_tokens=40
    )
    with Engine(
        settings, load_model(tiny_path, "float32", pack=False), KVStore([MemoryTier(1 << 28, lru)])
    ) as engine:
        context, each = asked(prompts(engine))
        before = engine.model.full_prefill(context.token_ids).logits
        adapter = filled(LoraAdapter(engine.model.model, 4, 0, str(tiny_path)))
        adapter.save(tmp_path / CHUNK_ADAPTER)
        model = BranchModel(
            engine.model.model, engine.model.profile, engine.runtime.encoder.filler(160), adapter
        )
        student = model.blockwise(context, each).logits
        teacher = model.full(context, each).logits
        _, taught = model.taught(
            context, [b.question for b in each], 3, (), (1,), [b.answer for b in each]
        )
        chunks = model.blockwise(context, each, (1,)).chunks
    with Engine(
        settings, load_model(tmp_path, "float32"), KVStore([MemoryTier(1 << 28, lru)])
    ) as engine:
        found = prompts(engine)
        engine.ingest([(text, "book") for text in CHUNKS[:4]])
        reused, full = [], []
        for prompt, branch in zip(found, each, strict=True):
            prepared = engine.prepare(prompt, Ask(policy="none", ratio=0.0))
            assert not prepared.plan.misses
            reused.append(engine.model.score_continuation(prepared.prefill, branch.answer))
            full.append(
                engine.model.score_continuation(
                    engine.model.full_prefill(prompt.token_ids), branch.answer
                )
            )
        plain = engine.model.full_prefill(context.token_ids)
        assert torch.equal(plain.logits, before)
        stored = engine.prepare(found[0], Ask(policy="none", ratio=0.0)).prefill.kv
    rows = [row for lo, hi in context.chunks for row in range(lo, hi)]
    assert 0 < len(rows) < len(context.token_ids)
    for mine, wanted in ((taught.chunks, plain.kv), (chunks, stored)):
        for (keys, values), layer in zip(mine, wanted.layers, strict=True):
            torch.testing.assert_close(keys, layer.keys[:, rows], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(values, layer.values[:, rows], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(student, torch.cat(reused), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(teacher, torch.cat(full), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(taught.logits, torch.cat(full), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(student, teacher, atol=1e-2)


def test_the_teacher_is_full_prefill(engine: Engine, branches: BranchModel) -> None:
    found = prompts(engine)
    context, each = asked(found)
    full = [engine.model.full_prefill(prompt.token_ids) for prompt in found]
    wanted = [engine.model.score_continuation(a, b.answer) for a, b in zip(full, each, strict=True)]
    states = branches.full(context, each, (1, 3))
    torch.testing.assert_close(states.logits, torch.cat(wanted), rtol=1e-4, atol=1e-4)
    assert states.hidden.shape == (2, sum(len(branch.tokens) for branch in each), 64)


def test_answers_are_written_side_by_side_as_apart(varied_path: Path) -> None:
    settings = Settings(model=str(varied_path), dtype="float32", prefix_cache=False, learn="off")
    with Engine(
        settings, load_model(varied_path, "float32", pack=False), KVStore([MemoryTier(1, lru)])
    ) as engine:
        found = prompts(engine)
        context, each = asked(found)
        model = BranchModel(engine.model.model, engine.model.profile, ())
        ends = {*ends_of(engine.model), 100}
        branches, states = model.taught(
            context, [branch.question for branch in each], 9, ends, (2,)
        )
        for branch, prompt in zip(branches, found, strict=True):
            ids, wanted = list(prompt.token_ids), list[int]()
            while len(wanted) < 9 and not ends & {*wanted}:
                wanted.append(int(engine.model.full_prefill([*ids, *wanted]).logits.argmax()))
            assert list(branch.answer) == wanted
        again, same = model.taught(
            context, [b.question for b in each], 9, ends, (2,), [b.answer for b in branches]
        )
        assert again == branches
        torch.testing.assert_close(same.logits, states.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            same.logits, model.full(context, branches).logits, rtol=1e-5, atol=1e-5
        )


def test_gradients_reach_a_chunk_adapter_through_the_chunks_alone(tiny_path: Path) -> None:
    settings = Settings(model=str(tiny_path), dtype="float32", prefix_cache=False, learn="off")
    with Engine(
        settings, load_model(tiny_path, "float32", pack=False), KVStore([MemoryTier(1, lru)])
    ) as engine:
        context, each = asked(prompts(engine))
        adapter = filled(LoraAdapter(engine.model.model, 4, 0, "tiny"))
        model = BranchModel(
            engine.model.model, engine.model.profile, engine.runtime.encoder.filler(160), adapter
        )
        loss = model.blockwise(context, each).logits.float().square().mean()
        assert not model.full(context, each).logits.requires_grad
    loss.backward()
    last = max(int(name.split("layers.")[1].split(".")[0]) for name in adapter.weights)
    # of the last layer only keys and values of chunks are read
    unread = ("q_proj", "o_proj", "mlp")
    for name, weight in adapter.weights.items():
        is_read = f"layers.{last}." not in name or not any(part in name for part in unread)
        assert is_read == (weight.grad is not None and bool(weight.grad.any())), name


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.endswith(REFUSED_HERE)])
def test_the_student_is_reuse_in_other_families(family: str) -> None:
    hf = kit.family(family)
    ids = torch.randint(3, 250, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    context, filler = ContextTokens(tuple(ids[:70]), ((5, 30), (33, 70))), ids[:20]
    student = (
        BranchModel(hf.model, hf.profile, filler)
        .blockwise(context, [Branch(tuple(ids[70:]), (7,))])
        .logits
    )
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
def test_what_a_mask_over_chunks_does_not_do_is_refused(family: str, found: str) -> None:
    hf = kit.family(family)
    with pytest.raises(RefusedError, match=found):
        BranchModel(hf.model, hf.profile, ())
