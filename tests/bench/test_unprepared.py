"""Nothing indexed: what is counted of prompts and traces, the doors as programs of any model, and a tiny whole run."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListChatModel
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from ragfuse_bench import unprepared
from ragfuse_bench.chains import doors as programs
from ragfuse_bench.chains.doors import TOP
from ragfuse_bench.chains.places import Prompted, Reply, prompted
from ragfuse_bench.options import doors_named
from ragfuse_bench.unprepared import (
    DOORS,
    Embedders,
    Ledger,
    Material,
    Question,
    Run,
    held_out,
    means,
    measure,
    require_doors,
    run_unprepared,
    show,
    span_of,
)
from rich.console import Console

from ragfuse.errors import InputError, RagFuseError, SettingsError
from ragfuse.settings import Settings
from tests.tiny import CHUNKS

WORDING = ("Read.\n\n", "\n\nQuestion: {question}\nAnswer:")
MATERIAL = Material((Question("Who?", ("the keeper",)), Question("How many?", ("forty",))), CHUNKS)
EMBEDDERS = Embedders(DeterministicFakeEmbedding(size=8), MockEmbedding(embed_dim=8))
FIRST, SECOND = tuple(range(100, 130)), tuple(range(200, 230))


class TakesTools(FakeListChatModel):
    """A model of nobody's that may be given tools."""

    def bind_tools(self, tools: Any, **said: Any) -> Any:
        assert [tool.name for tool in tools] == ["search"]
        return self


# counting


def test_a_passage_is_found_in_a_prompt_whose_ends_are_tokenised_otherwise() -> None:
    assert span_of((1, 2, *FIRST, 3), FIRST) == (2, 32)
    assert span_of((1, 2, 77, *FIRST[1:-1], 78, 3), FIRST) == (2, 32)
    assert span_of((1, 2, *FIRST[:15], 5, *FIRST[15:]), FIRST) is None
    assert span_of((1, 2, 3), FIRST) is None


def prompt(*found: tuple[int, int, float]) -> Prompted:
    return Prompted((1, 2, *FIRST, 9, 9, *SECOND, 3), found, 1.0)


def test_only_tokens_of_passages_count_and_what_is_computed_again_is_not_reused() -> None:
    """The beginning and what stands between passages is nobody's; a passage may be found in parts."""
    whole, again = Ledger([FIRST, SECOND]).count([prompt((0, 12, 0.0), (22, 40, 0.25))], 2)
    assert (whole.tokens, whole.found, whole.reused) == (60, 10 + 10 + 6, 10 + 0.75 * 16)
    assert (again.tokens, again.reused_share, again.found_share) == (0, None, None)


def test_a_passage_recurs_where_an_earlier_prompt_held_it() -> None:
    ledger, alone = Ledger([FIRST, SECOND]), Prompted((7, *FIRST, 8), ((1, 16, 0.0),), 1.0)
    assert ledger.count([alone], 1)[1].tokens == 0
    whole, again = ledger.count([prompt((2, 32, 0.0))], 2)
    assert (whole.tokens, again.tokens, again.reused_share) == (60, 30, 1.0)
    whole, again = ledger.count([alone, alone], 1)
    assert whole == again


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_with_other_passages_than_were_meant_is_an_error(n: int) -> None:
    with pytest.raises(RagFuseError, match=f"Wanted {n} whole passages .* found 2"):
        Ledger([FIRST, SECOND]).count([prompt()], n)


def test_what_is_computed_again_is_spread_over_chunks_that_are_not_exact() -> None:
    def segment(kind: str, start: int, hit: bool = True, exact: bool = False) -> dict[str, Any]:
        return {"kind": kind, "start": start, "n_tokens": 10, "hit": hit, "exact": exact}

    segments = [segment("prefix", 0, exact=True), segment("chunk", 10, exact=True), segment("chunk", 20)]
    segments += [segment("chunk", 30), segment("chunk", 40, hit=False)]
    found = prompted([1] * 50, {"segments": segments, "tokens_recomputed": 5}, 1.0).found
    assert found == ((0, 10, 0.0), (10, 20, 0.0), (20, 30, 0.25), (30, 40, 0.25))


# material and doors


def test_each_passage_of_the_material_holds_the_answer_to_its_question() -> None:
    material = held_out()
    assert len(material.questions) == len(material.passages) == len(set(material.passages)) == 12
    for question, passage in zip(material.questions, material.passages, strict=True):
        assert all(answer in passage for answer in question.answers)
    assert held_out(4).questions == material.questions[:4]
    assert held_out(4).passages == material.passages


@pytest.mark.parametrize("wrong", [(0,), (13,), (12, "no such article")])
def test_material_that_is_not_there_is_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(SettingsError, match="1 to 12 questions"):
        held_out(*wrong)


def test_doors_are_named_by_a_list_with_commas() -> None:
    assert doors_named("all") == tuple(DOORS)
    assert doors_named("none") == ()
    assert doors_named(" lcel,chain, lcel") == ("lcel", "chain")
    for wrong in ("lcel,window", "", ","):
        with pytest.raises(SettingsError, match="wanted all, none or some of chain, lcel"):
            doors_named(wrong)


def test_a_missing_package_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unprepared, "NEEDED", {"no_such_thing": "ragfuse-kv[demo]"})
    with pytest.raises(InputError, match=r"no_such_thing.*pip install 'ragfuse-kv\[demo\]'"):
        require_doors(["lcel"], Settings())
    require_doors([], Settings())


@pytest.mark.parametrize("program", [programs.retrieval_chain, programs.lcel_chain, programs.agent_step])
def test_langchains_programs_take_anybodys_model(program: Callable[..., programs.Program]) -> None:
    assert program(TakesTools(responses=["forty"]), CHUNKS, EMBEDDERS.langchain, WORDING)("How many?") == "forty"


@pytest.mark.parametrize("program", [programs.compact, programs.refine, programs.tree_summarize, programs.chat_engine])
def test_llama_indexs_programs_take_anybodys_model(program: Callable[..., programs.Program]) -> None:
    assert program(MockLLM(max_tokens=3), CHUNKS, EMBEDDERS.llama_index, WORDING)("How many?")


def test_the_programs_know_nothing_of_whose_model_they_are_given() -> None:
    assert "ragfuse" not in inspect.getsource(programs)


# a run


class Scripted:
    """A place that says what it is told to, in turn, and what of its one prompt was found."""

    def __init__(self, says: Sequence[tuple[str, tuple[tuple[int, int, float], ...], float]]) -> None:
        self._says, self.asked = list(says), list[tuple[str, bool]]()

    def ask(self, question: str, reuse: bool) -> Reply:
        self.asked.append((question, reuse))
        text, found, first_s = self._says.pop(0)
        return Reply(text, (Prompted((1, 2, *FIRST, 3), found, first_s),))

    def rest(self) -> None:
        self.asked.append(("rest", True))


@pytest.fixture(scope="module")
def tiny_run(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A random model with the defaults, but that it computes a quarter of chunks again."""
    home = tmp_path_factory.mktemp("home")
    settings = Settings(model=str(tiny_path), dtype="float32", home=home, policy="hkvd", ratio=0.25)
    return Run(settings, MATERIAL, EMBEDDERS, wording=WORDING)


def test_the_protocol_and_its_figures(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions once, twice each side by side in turn, then twice over the store that was filled."""
    every, none = ((0, 40, 0.0),), ()
    first = Scripted(
        [
            ("Forty", none, 1.0),
            ("blue", every, 1.0),
            *[("the forty.", every, 0.5), ("forty", none, 2.0)],  # ours first, then full prefill
            *[("blue", none, 3.0), ("red", every, 1.0)],
        ]
    )
    filled = Scripted([("forty", every, 1.0), ("red", every, 1.0), ("forty", every, 1.0), ("green", every, 1.0)])
    places, count = {False: first, True: filled}, Ledger.count

    class Opened:
        def __init__(self, place: Scripted) -> None:
            self.place = place

        def __enter__(self) -> Scripted:
            return self.place

        def __exit__(self, *_: object) -> None: ...

    door = unprepared.Door("script", "Nobody", "a script", lambda run, folder, indexed: Opened(places[indexed]))  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(Ledger, "count", lambda self, prompts: count(Ledger([FIRST], self.met), prompts, 1))
    row = measure(door, tiny_run)
    who, many = "Who?", "How many?"
    asked = [(who, True), (many, True), (who, True), (who, False), (many, False), (many, True)]
    assert first.asked == [each for one in asked for each in (one, ("rest", True))]
    assert [each for each in filled.asked if each[0] != "rest"] == [(who, True), (many, True)] * 2
    one, two = row["first_pass"], row["second_pass"]
    assert (one["reused_share"], one["recurring_share"], one["found_share"]) == (0.5, 1.0, 0.5)
    assert [each["reused_share"] for each in one["by_question"]] == [0.0, 1.0]
    assert (one["same_as_full"], one["same_as_indexed"]) == (1.0, 0.5)
    assert two["ttft_x"] == pytest.approx((4.0 + 3.0) / 2)
    assert (two["reused_share"], two["same_as_full"], two["same_as_indexed"]) == (1.0, 0.5, 0.5)
    assert (one["right"], two["right"], row["indexed"]["right"], row["full"]["right"]) == (0, 0, 0, 0)
    assert row["lines_changed"] == 1


@pytest.mark.parametrize("name", [name for name in DOORS if name != "server"])
def test_through_every_door_passages_are_reused_from_their_second_prompt_on(name: str, tiny_run: Run) -> None:
    row = measure(DOORS[name], tiny_run)
    one, two = row["first_pass"], row["second_pass"]
    assert one["by_question"][0]["found_share"] < 0.2  # some passages are alike
    assert 0.9 < one["recurring_found_share"] <= 1
    assert 0.5 < one["recurring_share"] <= 1
    assert 0.9 < two["found_share"] <= 1
    assert row["prompts"] == (2 * TOP if name == "refine" else 2)
    assert list(tiny_run.settings.home.glob("unprepared-*")) == []


@pytest.mark.slow
def test_a_server_learns_passages_of_plain_prompts(tiny_run: Run) -> None:
    """Met, met again and encoded, found."""
    asked = tuple(Question(text, ("forty",)) for text in ("Who?", "How many?", "When?"))
    run = Run(tiny_run.settings, Material(asked, CHUNKS), EMBEDDERS, wording=WORDING)
    row = measure(DOORS["server"], run)
    first, second, third = (each["found_share"] for each in row["first_pass"]["by_question"])
    assert first == 0
    assert third > max(0.8, second)
    assert row["second_pass"]["found_share"] > 0.8
    assert row["indexed"]["found_share"] > 0.8


def test_means_are_over_doors_and_the_table_names_them(tiny_run: Run) -> None:
    console = Console(file=io.StringIO(), width=220)
    result = json.loads(json.dumps(run_unprepared(tiny_run, ["lcel", "compact"], console)))
    rows = result["by_framework"]
    assert [(row["name"], row["option"]) for row in rows] == [("LangChain", "lcel"), ("LlamaIndex", "compact")]
    shares = [row["second_pass"]["found_share"] for row in rows]
    assert result["second_pass"]["found_share"] == pytest.approx(sum(shares) / 2)
    assert len(result["first_pass"]["by_question"]) == 2
    show(result, console)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    for words in ("where passages recur", "query engine, compact", "LCEL", "mean", "of 2"):
        assert words in said


def test_a_door_where_nothing_recurred_counts_in_no_mean_of_that() -> None:
    def row(recurring: float | None) -> dict[str, Any]:
        shares = {"reused_share": 0.5, "found_share": 0.5}
        first = {**shares, "recurring_share": recurring, "recurring_found_share": recurring}
        same = {"same_as_indexed": 1.0, "same_as_full": 1.0}
        second = {**shares, **same, "ttft_x": 1.0}
        return {"first_pass": {**first, **same, "by_question": [shares]}, "second_pass": second}

    assert means([row(None), row(0.5)])["first_pass"]["recurring_share"] == 0.5
    assert means([row(None)])["first_pass"]["recurring_share"] is None
