"""What of the ids that a model writes is its answer: up to a stop string in what it says, its end,
its last token.
"""

import shutil

import pytest
from transformers import GenerationConfig

from ragfuse import Ask, Engine
from tests.kits.scripted import saying

ASKED = [("user", "Go\n")]
SAID = "Hi 😀é世-end of it."


def wanted(stop):
    return SAID.split(stop)[0], "stop"


@pytest.mark.parametrize("stop", ["😀", "世", "é世", "世-e", "H", "of it.", "d of"])
def test_an_answer_ends_before_a_stop_string_streamed_or_not(engine, stop):
    answer = engine.answer(ASKED, saying(engine, SAID, stop=[stop]))
    assert (answer.text, answer.finish_reason) == wanted(stop)
    read = engine.model.text(answer.token_ids)
    assert stop in read
    # no token more than it took to say it
    assert stop not in engine.model.text(answer.token_ids[:-1])
    stream = engine.stream(ASKED, saying(engine, SAID, stop=[stop]))
    assert ("".join(stream), stream.answer.finish_reason) == wanted(stop)
    assert stream.answer.token_ids == answer.token_ids


@pytest.mark.parametrize("stop", ["\nHi", "o\nH", "Go", "\n", "|>H", "Hx", "it.."])
def test_a_stop_string_that_is_not_in_the_answer_does_not_end_it(engine, stop):
    for question in (ASKED, "Go\n"):
        answer = engine.answer(question, saying(engine, SAID, stop=[stop]))
        assert (answer.text, answer.finish_reason) == (SAID, "stop")
        pieces = list(engine.stream(question, saying(engine, SAID, stop=[stop])))
        assert "".join(pieces) == SAID


def test_stop_strings_of_a_batch_count_in_each_answer_alone(engine):
    free = Ask(max_tokens=10)
    texts = ["Go", "Stay there", "Hm\n"]
    stop = engine.answer(texts[1], free).text[3:5]
    for text, answer in zip(
        texts, engine.batch([*texts], Ask(max_tokens=10, stop=[stop, "Go", "there"])), strict=True
    ):
        assert answer.text == engine.answer(text, free).text.split(stop)[0]


def test_a_stop_string_may_be_a_special_token(engine):
    answer = engine.answer(ASKED, saying(engine, "Hi<|user|> and more", stop=["<|user|>"]))
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("Hi", "stop", 3)
    answer = engine.answer(ASKED, saying(engine, "Hi<|user|> and more", stop=["<|user|>x"]))
    assert (answer.text, answer.finish_reason) == ("Hi and more", "stop")


def test_a_stop_string_with_the_last_token_is_a_stop(engine):
    answer = engine.answer(ASKED, saying(engine, "Obs now", stop=["ow"], max_tokens=7))
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("Obs n", "stop", 7)


def test_stop_strings_of_a_generation_config_end_answers_too(tiny_settings, tmp_path):
    shutil.copytree(tiny_settings.model, tmp_path / "model")
    config = GenerationConfig(stop_strings=["<end>", "<|user|>"], eos_token_id=2)
    config.save_pretrained(tmp_path / "model")
    with Engine(tiny_settings.model_copy(update={"model": str(tmp_path / "model")})) as engine:
        for text in ("Say<end>x", "Say<|user|>x"):
            answer = engine.answer(ASKED, saying(engine, text))
            assert (answer.text, answer.finish_reason) == ("Say", "stop")
            assert "".join(engine.stream(ASKED, saying(engine, text))) == "Say"
        # beside those of the call
        answer = engine.answer(ASKED, saying(engine, "Say<end>x", stop=["a"]))
        assert (answer.text, answer.finish_reason) == ("S", "stop")
        own = {"stop_strings": ["y"]}  # in place of the config's
        answer = engine.answer(ASKED, saying(engine, "Sa<end>y.", options=own))
        assert (answer.text, answer.finish_reason) == ("Sa<end>", "stop")
        asked = {"generation_config": GenerationConfig(stop_strings="x", max_new_tokens=20)}
        assert engine.answer(ASKED, saying(engine, "Say<end>x", options=asked)).text == "Say<end>"


def test_pad_tokens_that_a_model_writes_are_counted(engine):
    pad = engine.model.tokenizer.pad_token_id
    answer = engine.answer(ASKED, saying(engine, "Hi", *[pad] * 10, ends=False, max_tokens=12))
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("Hi", "length", 12)
    answer = engine.answer(ASKED, saying(engine, "Hi", pad, pad, max_tokens=12))
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("Hi", "stop", 4)
