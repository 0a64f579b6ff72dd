"""What recurs is learnt from the text alone: by fingerprints, never the question, never across
tenants.
"""

import pytest
from cachetools import TTLCache

from ragfuse import Ask, Engine
from ragfuse.engine.remember import met_again
from ragfuse.types.plan import CODE, LoadPlan
from ragfuse.types.prompt import Prompt, Segment
from tests.kits.tiny import CHUNKS, adds_up, chunk_hits

SYSTEM = ("system", "Answer from the passages.")


@pytest.fixture
def learns(tiny_settings):
    return tiny_settings.model_copy(update={"learn": "text"})


@pytest.fixture
def learner(learns):
    with Engine(learns) as engine:
        yield engine


def ask(engine, passages, question, **how):
    answer = engine.answer([SYSTEM, ("user", "\n\n".join([*passages, question]))], Ask(**how))
    engine.flush()
    assert adds_up(answer.trace)
    return answer


def test_a_passage_of_two_prompts_is_reused_by_the_third(learner):
    assert not ask(learner, CHUNKS[:3], "Question: Who?").trace.tokens_reused
    assert not ask(learner, CHUNKS[2::-1], "Question: When?").trace.tokens_reused
    third = ask(learner, (CHUNKS[1], CHUNKS[2], CHUNKS[0]), "Question: Where?").trace
    assert chunk_hits(third) == [True] * 3
    assert third.tokens_chunks + third.tokens_recomputed == sum(map(len, CHUNKS[:3]))


def test_the_same_prompt_again_teaches_nothing(learner):
    for _ in range(4):
        last = ask(learner, CHUNKS[:3], "Question: Who?")
    assert not last.trace.tokens_reused


@pytest.mark.parametrize("learn", ["off", "retrieved"])
def test_a_setting_switches_it_off(tiny_settings, learn):
    with Engine(tiny_settings.model_copy(update={"learn": learn})) as engine:
        for question in ("Who?", "When?", "Where?", "Why?"):
            last = ask(engine, CHUNKS[:3], question)
        assert not last.trace.tokens_reused


@pytest.mark.parametrize("in_message", [True, False])
def test_the_question_is_never_learnt_after_passages_or_as_a_message_of_its_own(
    learner, in_message
):
    question = "What did the keeper of the lighthouse count in that one night of that year? " * 3
    for passage in CHUNKS[:4]:
        if in_message:
            asked = [SYSTEM, ("user", f"{passage}\n\n{question}")]
        else:
            asked = [("system", passage), ("user", question)]
        answer = learner.answer(asked)
        learner.flush()
    assert not answer.trace.tokens_reused


def test_two_tenants_never_learn_from_each_other(learns):
    with (
        Engine(learns) as mine,
        Engine(learns.model_copy(update={"salt": "b"}), mine.model, mine.store) as theirs,
    ):
        ask(mine, CHUNKS[:3], "Question: Who?")
        ask(theirs, CHUNKS[:3], "Question: Where?")
        ask(mine, CHUNKS[:3], "Question: When?")
        told = ask(theirs, CHUNKS[2::-1], "Question: Why?").trace
        assert not told.tokens_reused
        assert all(not segment.hit for segment in told.segments)
        assert told.fallback_reason == "none of this text is stored yet"
        assert ask(mine, CHUNKS[:3], "Question: Why?").trace.tokens_chunks > 0


def test_learnt_passages_are_known_to_later_processes(learns):
    with Engine(learns) as engine:
        for question in ("Question: Who?", "Question: When?"):
            ask(engine, CHUNKS[:3], question)
    with Engine(learns) as engine:
        assert chunk_hits(ask(engine, CHUNKS[:3], "Question: Why?").trace) == [True] * 3


def test_a_passage_is_forgotten_after_a_while():
    now = [0.0]
    met = TTLCache(9, 10.0, lambda: now[0])
    border = lambda token: (0, True)  # noqa: E731
    prompts = (
        Prompt((Segment(tuple(range(10, 60)), 0), Segment((token,), 50))) for token in (1, 2)
    )
    first, second = (LoadPlan(prompt, 0.1, "hkvd", ()) for prompt in prompts)
    assert met_again(first, border, met) == []
    now[0] = 11.0
    assert met_again(second, border, met) == []
    assert len(met_again(first, border, met)) == 1


def test_programs_are_reused_behind_an_equal_beginning_alone_and_the_trace_says_so(learns):
    program = (
        "def counted(ships): return {ship['name']: [ship.lamps[0]] for ship in ships if ship.lamps"
        " != []}"
    )
    with Engine(learns.model_copy(update={"prefix_cache": True})) as engine:
        for name in ("Ann", "Bob", "Eve"):
            last = ask(engine, [f"My name is {name}.", program], "Question: Who?").trace
        assert not last.tokens_chunks
        assert [segment.why for segment in last.segments if not segment.hit] == [CODE]
        assert ask(
            engine, ["My name is Eve.", program], "Question: When?"
        ).trace.tokens_prefix > len(program)


def test_instructions_in_markdown_and_definitions_of_tools_are_learnt(learner):
    rules = (
        "# Rules\n\n- Call `search(query)` first, and cite as [1].\n- Greet {name} at <desk>"
        " a_b@example.com.\n"
    )
    tool = {
        "name": "search",
        "description": CHUNKS[0],
        "parameters": {"type": "object", "properties": {}},
    }
    for stamp in ("a81f", "77c0", "93bb"):
        asked = [("system", f"cch={stamp};\n{rules}"), ("user", "Who?")]
        trace = learner.answer(asked, Ask(tools=[{"type": "function", "function": tool}])).trace
        learner.flush()
    found = sum(segment.n_tokens for segment in trace.segments if segment.hit)
    assert found >= len(rules) + len(CHUNKS[0])


def test_a_line_that_changes_is_lost_alone_wherever_it_stands(learner):
    lines = [line for text in CHUNKS for line in text.split(". ")]
    for at in (0, 3, len(lines)):
        for stamp in ("a81f", "77c0", "93bb"):
            said = "\n".join([*lines[:at], f"cch={stamp}{at};", *lines[at:]])
            answer = learner.answer([("system", said), ("user", "Who?")])
            learner.flush()
        found = sum(segment.n_tokens for segment in answer.trace.segments if segment.hit)
        assert found >= len("\n".join(lines)) - len(lines)
        assert answer.trace.tokens_reused + answer.trace.tokens_recomputed == found


def test_nothing_is_encoded_behind_a_beginning_that_did_not_recur(learns):
    with Engine(learns.model_copy(update={"prefix_cache": True})) as engine:
        engine.ingest([(text, "book") for text in CHUNKS[:2]])
        extended, extend = [], engine.prefixes.extend
        engine.prefixes.extend = lambda *given: (extended.append(given), extend(*given))
        for stamp in ("a81f", "77c0", "93bb"):
            engine.answer(
                [("system", f"It is {stamp}."), ("user", "\n\n".join([*CHUNKS[:2], "Who?"]))]
            )
        engine.flush()
        assert not extended
        engine.answer([("system", "It is 93bb."), ("user", "\n\n".join([*CHUNKS[:2], "When?"]))])
        engine.flush()
        assert extended
