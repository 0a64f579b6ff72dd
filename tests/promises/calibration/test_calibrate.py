"""Calibration: what it asks, what it calls safe, and that its choice is at work in the next
process.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from ragfuse import Ask, Engine, Settings
from ragfuse.calibration import calibrate as module
from ragfuse.calibration.calibrate import (
    LADDER,
    MAX_KL_OVER_REUSE,
    MIN_AGREEMENT,
    POOL_PASSAGES,
    REUSE,
    ChoiceResult,
    advice,
    calibrate,
    choose,
    curve,
    is_hopeless,
    make_cases,
)
from ragfuse.calibration.case import Case
from ragfuse.calibration.comparison import Row
from ragfuse.calibration.methods import Method
from tests.kits.tiny import CHUNKS, messages

DOCUMENTS = [
    *((f"{c} {c[::-1]} " * 2, "one") for c in CHUNKS),
    *((f"{c[::-1]} {c} end " * 2, "two") for c in CHUNKS),
]


def test_questions_are_made_from_the_documents_and_the_same_each_time():
    cases = make_cases(DOCUMENTS, 9)
    assert cases == make_cases(DOCUMENTS, 9)
    assert len({case.question for case in cases}) > 3
    for case in cases:
        assert len(set(case.chunks)) == 6
        assert set(case.chunks) <= {text for text, _ in DOCUMENTS}
        topic = case.question.removeprefix("What is said about ").removesuffix("?")
        assert any(topic in chunk for chunk in case.chunks)


def test_prompts_share_a_pool_of_chunks_and_each_chunk_is_asked_about_once():
    names = [f"document {number}" for number in range(9)]
    documents = [
        (f"{name} has a part {i} with words of its own, {name}-{i} " * 3, name)
        for name in names
        for i in range(20)
    ]
    cases = make_cases(documents, 20)
    assert cases == make_cases(documents, 20)
    assert len({chunk for case in cases for chunk in case.chunks}) <= POOL_PASSAGES
    assert len({frozenset(case.chunks) for case in cases}) == 20
    for case in cases:
        assert len(set(case.chunks)) == 6
        topic = case.question.removeprefix("What is said about ").removesuffix("?")
        assert any(topic in chunk for chunk in case.chunks)


def row(case: str, method: str, ratio: float, kl: float) -> Row:
    return Row("calibrate", case, method, ratio, 100, 1.0, 1.0, 3.0, 3.0, kl, 0.95)


def tried(
    policy: str, over: float, speed: float, high: float | None = None, top1: float = 0.99
) -> ChoiceResult:
    return ChoiceResult(
        policy, 0.1, over, over / 2, over * 1.2 if high is None else high, over, top1, speed
    )


def test_the_fastest_of_the_safe_ones_near_the_closest_is_chosen():
    close, quick = tried("hkvd", 0.09, 3.0), tried("lego", 0.10, 5.0)
    far, unsure = tried("lego", 0.15, 5.0), tried("lego", 0.1, 6.0, high=MAX_KL_OVER_REUSE + 0.01)
    rude = tried("lego", 0.1, 6.0, top1=MIN_AGREEMENT - 0.01)
    assert choose([quick, close, far, unsure, rude]) == quick
    assert choose([close, far, unsure, rude]) == close
    assert choose([unsure, rude]) is None


def test_the_advice_names_the_choice_and_a_model_that_is_not_verified():
    far = tried("hkvd", 0.8, 3.0)
    assert "hkvd at 10%" in advice("m", None, [far])
    assert "verify" in advice("m", None, [far], verified=False)
    assert advice("m", far, [far]).startswith("Use hkvd at 10% with m:")


@pytest.mark.parametrize(("share", "asked"), [(0.05, 12), (0.6, 8)])
def test_asking_ends_where_every_choice_is_out(share, asked, random_weights, monkeypatch):
    """Of one choice the KL is given, as a share of plain reuse's; of all others it is far."""

    def given(
        lab: Any, runner: Any, case: Case, methods: Sequence[Method], answers: bool
    ) -> list[Row]:
        kls = {method: 1.0 if method == REUSE else 0.9 for method in methods} | {LADDER[-1]: share}
        return [row(case.id, each.name, each.ratio or 0.0, kls[each]) for each in methods]

    monkeypatch.setattr(module, "ask", given)
    with Engine(random_weights) as engine:
        result = calibrate(engine.model, make_cases(DOCUMENTS, 12), Console(quiet=True), "m")
    assert result["questions"] == asked
    assert result["safe"] is (share < 0.25)


def test_the_curve_is_worked_out_on_the_same_questions():
    rows = [row(case, "none", 0.0, kl) for case, kl in (("a", 1.0), ("b", 3.0))]
    rows += [row(case, method.name, method.ratio or 0.0, 0.5) for case in "ab" for method in LADDER]
    found = curve(rows)
    assert [(each.policy, each.ratio) for each in found] == [(m.policy, m.ratio) for m in LADDER]
    assert all(each.kl_over_reuse == pytest.approx(0.25) and each.ttft_x == 3.0 for each in found)
    assert all(each.low <= 0.25 <= each.high for each in found)


def measured(method: Method, kls: list[float], top1: float, speed: float) -> list[Row]:
    return [
        Row("calibrate", str(i), method.name, method.ratio, 100, 1.0, 1.0, speed, speed, kl, top1)
        for i, kl in enumerate(kls)
    ]


def test_only_what_is_clearly_out_is_measured_no_longer():
    far, rude, unsure = (Method("lexical", ratio) for ratio in (0.01, 0.02, 0.03))
    spread = [0.9, 1.1] * 5
    rows = measured(Method("none", 0.0, "alone"), [10 * each for each in spread], 0.5, 20.0)
    rows += measured(far, [6 * each for each in spread], 0.95, 15.0)
    rows += measured(rude, spread, 0.5, 15.0)
    rows += measured(unsure, [1.0, 9.0, 0.0, 2.0] + 6 * [0.5], 0.95, 5.0)
    assert [is_hopeless(rows, method) for method in (far, rude, unsure)] == [True, True, False]
    assert [each.outcome for each in curve(rows, [far, rude])] == ["too far", "top-1 too low"]


@pytest.fixture(scope="module")
def random_weights(varied_path, tmp_path_factory):
    """A model of random weights over a store that remembers what its calibration said."""
    home = tmp_path_factory.mktemp("calibrated")
    return Settings(
        model=str(varied_path), dtype="float32", store=home / "store", home=home, max_tokens=12
    )


@pytest.fixture(scope="module")
def report(random_weights):
    """What calibration says of it."""
    with Engine(random_weights) as engine:
        return calibrate(engine.model, make_cases(DOCUMENTS, 5), Console(quiet=True), "random")


@pytest.mark.slow
def test_a_report_is_plain_json(report):
    assert set(report) >= {"safe", "policy", "ratio", "kl_over_reuse", "seconds", "tried", "advice"}
    assert json.loads(json.dumps(report)) == report


def test_an_unsafe_model_answers_by_full_prefill_in_the_next_process_too(random_weights):
    with Engine(random_weights) as engine:
        engine.runtime.learn(engine.runtime.profile.calibrated(False))
    with Engine(random_weights) as engine:
        engine.ingest([(chunk, "book") for chunk in CHUNKS])
        answer = engine.answer(messages())
        assert "calibrate" in answer.trace.fallback_reason
        assert answer.trace.tokens_reused == 0
        asked = engine.answer(messages(), Ask(policy="hkvd"))
        assert not asked.trace.fallback_reason
        assert asked.trace.tokens_reused > 0


def test_a_choice_is_kept_and_used(tiny_settings):
    with Engine(tiny_settings) as engine:
        engine.runtime.learn(engine.runtime.profile.calibrated(True, "lego", 0.25))
    with Engine(tiny_settings) as engine:
        engine.ingest([(chunk, "book") for chunk in CHUNKS], engine.prefix(messages()))
        trace = engine.answer(messages()).trace
        assert (trace.policy, trace.ratio) == ("lego", 0.25)


def test_the_picture_shows_every_rung(report, tmp_path):
    from ragfuse.calibration.calibrate import draw_calibration

    draw_calibration(report, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(report["tried"]) == len(LADDER)
