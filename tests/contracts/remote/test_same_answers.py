"""What a server answers is what an engine in this process answers: tokens, pieces, traces, counts,
errors.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any

import pytest

from integrations.tests import pml
from ragfuse import (
    Answer,
    Ask,
    ChatMessage,
    Engine,
    Grammar,
    InputError,
    Piece,
    PMLTemplate,
    ToolCall,
)
from ragfuse.remote import RemoteEngine
from tests.kits.serve import Served, wait_for

TEXTS = [
    f"Passage {number}: the keeper of the {name} tower counted {number} ships at night."
    for number, name in enumerate(("north", "south", "east"))
]
HUE = {"type": "object", "properties": {"hue": {"type": "boolean"}}, "required": ["hue"]}
LOOK = {"name": "look", "description": "Look at a door.", "parameters": HUE}
TOOL = {"type": "function", "function": LOOK}


@pytest.fixture
def both(local: Engine, remote: RemoteEngine, served: Served) -> Any:
    """A function that asks both two questions, the second after what the first brought is stored;
    returns both answers of each.
    """

    def ask(first: Any, second: Any, ask: Ask = Ask()) -> list[tuple[Answer, Answer]]:  # noqa: B008
        found = [(local.answer(first, ask), remote.answer(first, ask))]
        local.flush()
        served.engine().flush()
        return [*found, (local.answer(second, ask), remote.answer(second, ask))]

    return ask


def is_same(here: Answer, there: Answer) -> bool:
    """Whether all is equal but times and the model's name for itself."""
    counts = attrgetter(
        "tokens", "tokens_reused", "tokens_recomputed", "tokens_fresh", "fallback_reason"
    )
    of_segment = attrgetter("kind", "n_tokens", "start", "hit", "source", "encoded")
    of_answer = attrgetter("token_ids", "text", "finish_reason", "reasoning")
    assert counts(here.trace) == counts(there.trace)
    assert list(map(of_segment, here.trace.segments)) == list(map(of_segment, there.trace.segments))
    assert of_answer(here) == of_answer(there)
    return True


def test_retrieved_documents_are_found_in_the_prompt_and_reused(both: Any) -> None:
    ask = Ask(documents=[(text, f"book-{at}") for at, text in enumerate(TEXTS)], ratio=0.2)
    first = [
        ChatMessage("user", f"Read this.\n{TEXTS[0]}\n\n{TEXTS[1]}\n\n{TEXTS[2]}\nWhich ships?")
    ]
    second = [
        ChatMessage("user", f"Read this too.\n{TEXTS[2]}\n\n{TEXTS[0]}\n\n{TEXTS[1]}\nWhat else?")
    ]
    answers = both(first, second, ask)
    assert all(is_same(here, there) for here, there in answers)
    assert answers[1][1].trace.tokens_reused > 0
    assert sum(segment.hit for segment in answers[1][1].trace.segments) == 3


def test_documents_that_are_printed_or_cut_are_found_as_an_engine_finds_them(both: Any) -> None:
    text = f'{TEXTS[0]} It is said that "nobody" saw them,\nnot even once in years at the sea.'
    ask = Ask(documents=[(text, "book"), (TEXTS[1], "book")], ratio=0.2)
    answers = both(f"{text} {TEXTS[1]} And so", f"So: {[text]} {text[10:]} {TEXTS[1]} Who?", ask)
    assert all(is_same(here, there) for here, there in answers)
    assert answers[1][1].trace.tokens_reused > 0


def test_odd_text_in_a_chunk_stays_text(both: Any) -> None:
    odd = f"{TEXTS[0]} <|assistant|> \ud83d \x00 </s>"
    said = [ChatMessage("user", [Piece(odd, "chunk", "odd\ud800.txt"), "\nWhich?"])]
    for here, there in both(said, said, Ask(ratio=0.2)):
        assert is_same(here, there)
        assert here.trace.segments[0].n_tokens > len(odd.encode(errors="replace")) - 8


@pytest.mark.parametrize(
    "ask",
    [
        Ask(
            options={
                "do_sample": True,
                "temperature": 1.4,
                "top_p": 0.9,
                "top_k": 20,
                "min_p": 0.01,
            },
            seed=3,
        ),
        Ask(options={"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {100: 3.0}}),
        Ask(options={"repetition_penalty": 1.5, "min_new_tokens": 3}, max_tokens=5),
        Ask(stop=["e", "q"]),
        Ask(reuse=False),
        Ask(grammar=Grammar.regex("[a-c]{4}")),
        Ask(options={"max_time": 0.0}),
    ],
)
@pytest.mark.parametrize(
    "question", ["Once there", [ChatMessage("user", "Which door is it?")], [70, 71, 72]]
)
def test_every_option_means_the_same(
    local: Engine, remote: RemoteEngine, question: Any, ask: Ask
) -> None:
    assert is_same(local.answer(question, ask), remote.answer(question, ask))


def test_a_conversation_with_calls_arrives_whole(local: Engine, remote: RemoteEngine) -> None:
    said = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Which door?"),
        ChatMessage(
            "assistant",
            "",
            (ToolCall("look", {"hue": True, "why": "ä"}, "call_1"),),
            reasoning="Hm.",
        ),
        ChatMessage(
            "tool",
            ["It is ", Piece("green, as all doors of this house.", "chunk", "doors")],
            (),
            "call_1",
            "look",
        ),
    ]
    assert is_same(local.answer(said), remote.answer(said))


def test_eight_threads_get_the_answers_that_one_gets(remote: RemoteEngine) -> None:
    prompts = [f"Door {number} is" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: remote.answer(prompt).token_ids, prompts))
    assert together == [remote.answer(prompt).token_ids for prompt in prompts]
    assert [answer.token_ids for answer in remote.batch(prompts)] == together
    assert remote.batch([]) == []


def test_leaving_a_stream_ends_the_generation_at_the_server(
    remote: RemoteEngine, served: Served
) -> None:
    stream = remote.stream("Once there", Ask(max_tokens=3000))
    assert next(iter(stream))
    stream.close()
    wait_for(served.is_idle)


def test_a_conversation_goes_on_by_its_name(both: Any) -> None:
    ask = Ask(session="talk")
    answers = both(
        [ChatMessage("user", "Which door is it, please?")],
        [ChatMessage("user", "And why is that?")],
        ask,
    )
    assert all(is_same(here, there) for here, there in answers)
    assert answers[1][1].trace.session == "talk"
    assert answers[1][1].trace.history_reused > 0


def test_modules_are_registered_at_the_server_and_reused(
    both: Any, local: Engine, remote: RemoteEngine
) -> None:
    filled = PMLTemplate(pml.TRIP, pml.PROMPT).fill(
        {"days": 'a "week" </plan> &', "question": "What <diet/>?"}
    )
    for engine in (local, remote):
        assert not engine.schemas.has(filled.schema)
        done = engine.schemas.ensure(filled.schema)
        assert done is not None
        assert done.done.encoded > 0
        assert engine.schemas.has(filled.schema)
        assert engine.schemas.ensure(filled.schema) is None
    other = PMLTemplate(pml.TRIP.replace("journeys", "voyages"))
    assert not remote.schemas.has(other.schema)
    for here, there in both(filled.request, filled.request):
        assert is_same(here, there)
        assert there.trace.modules == here.trace.modules != ()


def test_tokens_are_counted_by_the_servers_tokenizer(local: Engine, remote: RemoteEngine) -> None:
    assert remote.tokens("Ein Leuchtturm, grün") == local.tokens("Ein Leuchtturm, grün")
    assert (
        remote.tokens("<s>", special=True)
        == local.tokens("<s>", special=True)
        != remote.tokens("<s>")
    )
    said = [ChatMessage("user", "Which door?")]
    assert remote.count_tokens(said, [TOOL]) == local.count_tokens(said, [TOOL])
    card = local.card
    assert (remote.card.max_context, remote.card.has_chat_template) == (
        card.max_context,
        card.has_chat_template,
    )


def test_refusals_of_the_engine_are_those_of_the_server(
    local: Engine, remote: RemoteEngine
) -> None:
    for engine in (local, remote):
        with pytest.raises(InputError, match="takes at most"):
            engine.answer([ChatMessage("user", "a " * 5000)])
        with pytest.raises(InputError, match="colour"):
            engine.answer([ChatMessage("user", "Why?")], Ask(chat_template_kwargs={"colour": 1}))
        with pytest.raises(InputError, match="There are no messages"):
            engine.answer([])


def test_what_a_server_cannot_do_is_said_at_once(remote: RemoteEngine) -> None:
    with pytest.raises(InputError, match="not accept the option 'num_beams'"):
        remote.stream("Why?", Ask(options={"num_beams": 2}))
    with pytest.raises(InputError, match="needs a temperature"):
        remote.stream("Why?", Ask(options={"do_sample": True}))
    for work in (lambda: remote.ingest([("A text.", "a")]), lambda: remote.digest):
        with pytest.raises(InputError, match="engine"):
            work()
    remote.know([("A text.", "a")])
    remote.prefetch(["A text."])
