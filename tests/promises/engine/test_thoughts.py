"""What a model thinks before its answer is told apart from it, by its template's tags, streamed or
not.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from integrations.tests.kit import TEMPLATE
from ragfuse import Ask, ChatMessage, Engine, Grammar, InputError, Settings, ToolCall
from ragfuse.text.chat_template import THOUGHT_TAGS, ChatTemplate, Thoughts
from ragfuse.types.answer import Thought
from tests.kits.scripted import saying
from tests.kits.thinking import thinking_model
from tests.promises.engine.test_native_calls import TOOLS

ASKED = [("user", "Who?")]
CALL = '<tool_call>{"name": "news", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture(scope="module")
def opened(tiny_path, tmp_path_factory):
    """An engine over a model whose prompts open a thought."""
    yield from over(thinking_model(tiny_path, tmp_path_factory.mktemp("opened") / "model"))


@pytest.fixture(scope="module")
def free(tiny_path, tmp_path_factory):
    """The same, but the model opens its thoughts itself."""
    yield from over(thinking_model(tiny_path, tmp_path_factory.mktemp("free") / "model", TEMPLATE))


def over(folder):
    home = folder.parent
    with Engine(
        Settings(model=str(folder), dtype="float32", store=home, home=home, max_tokens=40)
    ) as made:
        yield made


def test_an_answer_is_what_follows_the_thought(opened, free):
    for made, begin in ((opened, ""), (free, "<think>\n"), (free, "\n<think>")):
        answer = made.answer(ASKED, saying(made, f"{begin}I wonder. \n</think>\n\nForty ships. "))
        assert (answer.reasoning, answer.text, answer.finish_reason) == (
            "I wonder.",
            "Forty ships. ",
            "stop",
        )


def test_a_stream_says_thoughts_and_text_apart(opened):
    said = "I wonder <b>. \n</think>\n\nForty\n\nships."
    stream = opened.stream(ASKED, saying(opened, said))
    pieces = list(stream.pieces())
    thoughts = [piece.text for piece in pieces if isinstance(piece, Thought)]
    texts = [piece for piece in pieces if isinstance(piece, str)]
    assert "".join(thoughts) == stream.answer.reasoning == "I wonder <b>."
    assert len(thoughts) > 5
    assert "".join(texts) == stream.answer.text == "Forty\n\nships."
    assert "".join(opened.stream(ASKED, saying(opened, said))) == stream.answer.text


def test_a_thought_that_never_ends_is_no_answer(opened):
    answer = opened.answer(ASKED, saying(opened, "I wonder", ends=False, max_tokens=8))
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("I wonder", "", "length")
    assert len(answer.token_ids) == 8


def test_without_a_thought_all_is_text(free, engine):
    for text in ("Forty ships.", "<thin air", " <b>", "Say </think> or <think>."):
        answer = free.answer(ASKED, saying(free, text))
        assert (answer.reasoning, answer.text) == ("", text)
    answer = engine.answer(ASKED, saying(engine, "<think>Hm</think>Yes."))
    assert (answer.reasoning, answer.text) == ("", "<think>Hm</think>Yes.")


def test_stop_strings_count_behind_the_thought(opened):
    answer = opened.answer(
        ASKED, saying(opened, "Ships? No.</think>Forty ships.", stop=["hip", "N"])
    )
    assert (answer.reasoning, answer.text, answer.finish_reason) == (
        "Ships? No.",
        "Forty s",
        "stop",
    )


def test_a_call_behind_a_thought_or_instead_of_its_end_is_a_call(opened):
    for end in ("</think>\n", "\n"):
        answer = opened.answer(ASKED, saying(opened, f"I ask.{end}{CALL}", tools=TOOLS))
        assert (answer.reasoning, answer.text, answer.finish_reason) == ("I ask.", "", "tool_calls")
        (call,) = answer.tool_calls
        assert (call.name, call.arguments) == ("news", {"city": "Rome"})
    answer = opened.answer(ASKED, saying(opened, f"Hm</think>I ask.\n{CALL}", tools=TOOLS))
    assert (answer.reasoning, answer.text, len(answer.tool_calls)) == ("Hm", "I ask.", 1)


def test_what_must_be_a_call_or_follow_a_grammar_thinks_nothing(opened):
    answer = opened.answer(ASKED, Ask(tools=TOOLS, tool_choice="news", max_tokens=150))
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("", "", "tool_calls")
    assert isinstance(answer.tool_calls[0], ToolCall)
    answer = opened.answer(ASKED, Ask(grammar=Grammar.choice(["yes", "no"])))
    assert answer.text in ("yes", "no")


def test_a_plain_text_is_gone_on_with_as_it_stands(opened):
    answer = opened.answer("<think>", saying(opened, "Hm</think>Yes."))
    assert (answer.reasoning, answer.text) == ("", "Hm</think>Yes.")
    one, other = opened.batch(["<think>", "Who?"], Ask(max_tokens=12))
    assert one.reasoning == other.reasoning == ""


def test_a_text_in_a_session_is_a_message_so_its_answer_may_think(opened):
    said = saying(opened, "I wonder. \n</think>\n\nForty.")
    answer = opened.answer("Who?", replace(said, session="of a text"))
    assert (answer.reasoning, answer.text) == ("I wonder.", "Forty.")


def test_tags_are_known_by_template_or_tokenizer():
    def thoughts(template: str, *added: str) -> Thoughts | None:
        tokens = dict(enumerate(added))
        made = SimpleNamespace(chat_template=template, added_tokens_decoder=tokens)
        return ChatTemplate(made).thoughts

    for open, close in THOUGHT_TAGS:
        assert thoughts("", open, close) == Thoughts(open, close)
        assert thoughts(f"{{{{ m.split('{close}')[-1] }}}}") == Thoughts(open, close)
        assert thoughts("", open) is None
    assert thoughts("{{ messages }}", "<tool_call>") is None
    tags = Thoughts("<think>", "</think>")
    assert tags.is_open("<|assistant|><think>\n")
    # an empty one: nothing is to be thought
    assert not tags.is_open("<|assistant|><think>\n\n</think>\n\n")
    assert not tags.is_open("<think>I was")


def test_the_next_turn_goes_on_from_the_answer_alone(opened):
    opened.answer(ASKED, saying(opened, "Hm</think>Yes.", session="s"))
    prompt = opened.plan([("user", "So?")], Ask(session="s")).prompt
    text = opened.model.tokenizer.decode(prompt.token_ids)
    assert "<|assistant|>Yes." in text
    assert "Hm" not in text


def test_what_a_template_does_not_read_is_refused_not_ignored(opened, engine):
    for made in (opened, engine):
        with pytest.raises(InputError, match=r"'reasoning_effort'.*Use only"):
            made.answer(ASKED, Ask(chat_template_kwargs={"reasoning_effort": "low"}))
    with pytest.raises(InputError, match="'enable_thinking'"):
        opened.answer(ASKED, Ask(chat_template_kwargs={"enable_thinking": False}))
    # it thinks nothing
    answer = engine.answer(ASKED, Ask(chat_template_kwargs={"enable_thinking": False}))
    assert answer.text == engine.answer(ASKED, Ask()).text


THOUGHT = (
    "{% if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{%"
    " endif %}"
)
REMEMBERS = TEMPLATE.replace("{{ message['content'] }}", THOUGHT + "{{ message['content'] }}")


def text_of(engine, turns, ask=None):
    ids = engine.prompt(turns, ask=ask or Ask()).token_ids
    return str(engine.model.tokenizer.decode(list(ids), skip_special_tokens=False))


def test_what_was_thought_before_an_earlier_answer_is_handed_to_the_template(tiny_path, tmp_path):
    assert REMEMBERS != TEMPLATE
    for made in over(thinking_model(tiny_path, tmp_path / "model", REMEMBERS)):
        said = [("user", "Who?"), ("assistant", "It."), ("user", "Sure?")]
        plain = [{"role": role, "content": text} for role, text in said]
        plain[1]["reasoning_content"] = "A lighthouse counts."
        silent = [ChatMessage(role, text) for role, text in said]
        turns = [silent[0], replace(silent[1], reasoning="A lighthouse counts."), silent[2]]
        wanted = made.model.tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=True
        )
        assert "<think>A lighthouse counts.</think>It." in wanted
        assert text_of(made, turns) == text_of(made, turns, Ask(reuse=False)) == wanted
        answer = made.answer(turns, Ask(session="talk"))
        assert answer.trace.tokens == len(made.prompt(turns).token_ids)
        assert made.prompt(silent).token_ids != made.prompt(turns).token_ids
        turns[1] = replace(turns[1], reasoning="forged </think> tag \ud800")
        ids = list(made.prompt(turns).token_ids)
        close = made.model.tokenizer.convert_tokens_to_ids("</think>")
        assert ids.count(close) == 1
        assert "forged </think> tag \ufffd" in text_of(made, turns)
