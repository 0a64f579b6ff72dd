"""What is decoded at the same time is computed together, and everyone gets what he would
get alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

from ragfuse.hf.grammar import GrammarCompiler, GrammarProcessor
from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.types.grammar import Grammar
from tests.kits import hf as kit
from tests.kits.families import FAMILIES, REFUSED, all_when_slow
from tests.twins.hf.test_grammar import bytes_tokenizer

LENGTH = 10
GREEDY = kit.greedy(LENGTH)
LONG = kit.greedy(400)
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 1.5}
SIZES = (33, 9, 60, 21)
WAIT_S = 60.0
Way = dict[str, Any]
"""Arguments of `generate`."""


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    for thread in threading.enumerate():
        if thread.name == "ragfuse-decode":
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def nothing_failed(caplog, request):
    """No step of several failed and was done one by one, unless that is the test."""
    yield
    if "fails" not in request.node.name:
        assert not [record for record in caplog.records if record.name == "ragfuse.hf"]


@pytest.fixture
def patient(monkeypatch):
    """The model of a family, whose steps wait for all."""

    def made(name: str) -> HFModel:
        model = kit.family(name)
        monkeypatch.setattr(model.batcher, "patience_s", WAIT_S)
        return model

    return made


@pytest.fixture
def model(patient):
    return patient("llama")


@pytest.fixture
def own_model():
    """One that a test may break; its steps wait for all."""
    model = HFModel(kit.build("llama", {}), kit.tokenizer())
    model.batcher.patience_s = WAIT_S
    return model


class Said(StoppingCriteria):
    """Counts tokens, does something at one of them, and ends the answer once an event is set."""

    def __init__(
        self,
        at: int = 0,
        do: Callable[[], object] = lambda: None,
        end: threading.Event | None = None,
    ) -> None:
        self._count, self._at, self._do, self._end = 0, at, do, end

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        self._count += 1
        if self._count == self._at:
            self._do()
        return torch.full(
            (1,), self._end is not None and self._end.is_set(), device=input_ids.device
        )


class Noting(LogitsProcessor):
    """Notes what it is given and changes nothing."""

    def __init__(self) -> None:
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores.append(scores.clone())
        return scores


class Job(threading.Thread):
    """One `generate` in a thread; `ids` is what it wrote, or raises what ended it."""

    def __init__(
        self, model: HFModel, prefill: Prefill, *stopping: Said, options: Way = GREEDY
    ) -> None:
        super().__init__(daemon=True)
        self._call = lambda: generate(model, prefill, options, stopping=list(stopping))
        self._found: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._found = self._call()
        except BaseException as error:
            self._found = error

    @property
    def ids(self) -> list[int]:
        self.join(WAIT_S)
        assert not self.is_alive()
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found


def prefills(model: HFModel, sizes: Sequence[int] = SIZES) -> list[Prefill]:
    return [model.full_prefill(kit.ids(size, seed)) for seed, size in enumerate(sizes)]


def way(*processors: LogitsProcessor, **options: Any) -> Way:
    """Greedy decoding with these options."""
    held = {"logits_processor": LogitsProcessorList(processors)} if processors else {}
    return {"options": {**GREEDY, **held, **options}}


def alone(model: HFModel, each: Sequence[Prefill], ways: Sequence[Way]) -> list[list[int]]:
    return [generate(model, prefill, **way) for prefill, way in zip(each, ways, strict=True)]


def beside(model: HFModel, each: Sequence[Prefill], ways: Sequence[Way]) -> list[list[int]]:
    return kit.together(model, list(zip(each, ways, strict=True)))


def waited(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


@pytest.mark.parametrize("name", all_when_slow([*FAMILIES, *REFUSED]))
def test_every_family_says_together_what_each_says_alone(name, patient):
    model = patient(name)
    # which changes what its cache returns
    shares = model.shared_wiring is not None and name != "deepseek-latent"
    ways = [{**way(max_new_tokens=n), "seed": 3} for n in (LENGTH, LENGTH // 2, LENGTH, LENGTH)]
    wanted, before = alone(model, prefills(model), ways), model.batcher.steps
    assert beside(model, prefills(model), ways) == wanted
    assert (model.batcher.steps > before) == shares


def rewind(prefills: Sequence[Prefill]) -> None:
    for prefill in prefills:
        prefill.rewind()


def test_requests_join_and_leave_in_the_middle(model):
    """One comes late and ends early, another is cancelled and leaves at its next token."""
    each = prefills(model)
    wanted, gone = alone(model, each, [way()] * 4), threading.Event()
    rewind(each)
    late: list[Job] = []
    short = kit.greedy(3)
    join = Said(4, lambda: late.append(Job(model, each[1], options=short)))
    cancelled = Job(model, each[3], Said(end=gone), options=LONG)
    first, other = Job(model, each[0], join), Job(model, each[2], Said(5, gone.set))
    assert [first.ids, other.ids] == [wanted[0], wanted[2]]
    assert late[0].ids == wanted[1][:3]
    assert len(cancelled.ids) < 400


def test_all_ways_to_write_go_beside_each_other(model):
    words = bytes_tokenizer()
    grammars = GrammarCompiler(words, 256, [])

    def ways() -> list[Way]:
        return [
            way(),
            {"options": SAMPLED, "seed": 5},
            way(output_hidden_states=True),
            way(guidance_scale=1.5),
            way(repetition_penalty=1.7),
            {"options": SAMPLED, "seed": 7},
            way(GrammarProcessor(grammars, Grammar.regex("[ab]{4}c[de]{9}"))),
        ]

    each = prefills(model, range(11, 18))
    wanted = alone(model, each, ways())
    rewind(each)
    assert set(words.decode(wanted[-1][:4])) <= set("ab")
    # what asks for hidden states shares no step, and would be waited for
    model.batcher.patience_s = 0.02
    assert beside(model, each, ways()) == wanted


def test_a_step_does_not_wait_for_a_slow_request(model):
    model.batcher.patience_s = 0.02
    over = threading.Event()
    one, two, three = prefills(model, SIZES[:3])
    wanted = generate(model, one, GREEDY)
    rewind([one])
    slow = Job(model, one, Said(2, lambda: waited(over)))
    quick = [Job(model, prefill) for prefill in (two, three)]
    assert all(len(job.ids) == LENGTH for job in quick)
    over.set()
    assert slow.ids == wanted


def test_requests_are_active_while_they_decode_and_not_afterwards(model):
    seen: list[int] = []
    look = Said(3, lambda: seen.append(model.batcher.active))
    beside(model, prefills(model, SIZES[:2]), [{**way(), "stopping": [look]}, way()])
    assert seen == [2]
    assert model.batcher.active == 0
    assert model.batcher.wait_idle(0)


def test_after_failed_shared_steps_requests_run_one_by_one(own_model, caplog):
    def refuse(module: object, args: tuple[Any, ...]) -> None:
        if args[0].shape[0] > 1:
            raise RuntimeError("too many")

    wanted = alone(own_model, prefills(own_model), [way()] * 4)
    own_model.model.model.layers[2].mlp.register_forward_pre_hook(refuse)
    for _ in range(2):
        assert beside(own_model, prefills(own_model), [way()] * 4) == wanted
    assert own_model.batcher.steps == 0
    assert len(caplog.records) == 3


def test_a_request_that_fails_in_a_shared_step_fails_alone(own_model):
    bad, model = 77, own_model

    class Forced(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            is_its_turn = input_ids.shape[1] == SIZES[1] + 4
            return scores.index_fill(1, kit.tensor([bad]), 1e9) if is_its_turn else scores

    def refuse(module: object, args: tuple[Any, ...]) -> None:
        if args[0].shape[1] == 1 and bool((args[0] == bad).any()):
            raise ZeroDivisionError

    ways = [way(suppress_tokens=[bad])] * 4
    ways[1] = way(Forced())
    wanted = alone(model, prefills(model), ways)
    assert wanted[1][4] == bad
    model.model.get_input_embeddings().register_forward_pre_hook(refuse)
    jobs = [Job(model, p, **way) for p, way in zip(prefills(model), ways, strict=True)]
    assert [jobs[number].ids for number in (0, 2, 3)] == [wanted[number] for number in (0, 2, 3)]
    with pytest.raises(ZeroDivisionError):
        _ = jobs[1].ids
    assert model.batcher.steps > LENGTH // 2


def test_a_window_shorter_than_the_prompt_is_decoded_as_by_the_model():
    """Keys of a window do not begin where their buffer does: in bfloat16 no step fails for it, in
    float32 the answer is the model's.
    """
    options, ids = {"sliding_window": 520, "max_position_embeddings": 2048}, kit.ids(700)
    for dtype in (torch.bfloat16, torch.float32):
        model = HFModel(kit.build("mistral", options, dtype=dtype), kit.tokenizer())
        said = generate(model, model.full_prefill(ids), GREEDY)
        assert len(said) == LENGTH
    assert said == kit.theirs(model, ids, GREEDY)
