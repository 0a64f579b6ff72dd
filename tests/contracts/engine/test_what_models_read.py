"""What an engine reads is what its model's template writes: messages, texts, ids, schemas,
conversations.
"""

from __future__ import annotations

import copy

import pytest
import torch

from ragfuse import Ask, Engine, InputError, Piece, Settings, SettingsError
from ragfuse.schemas.pml import parse_prompt
from tests.contracts.text.test_reading import CHATML, INST, SPECIAL, Kind, tokenizer
from tests.kits import hf as kit
from tests.kits.tiny import CHUNKS, messages

THINKS = (
    CHATML + "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)


@pytest.fixture(scope="module", params=["first", "legacy", "always", "never"])
def folder(request, tmp_path_factory):
    """A random model over a tokenizer that may put a space before texts."""
    folder = tmp_path_factory.mktemp(request.param)
    words = copy.deepcopy(tokenizer(Kind(request.param, is_exact=False)))
    words.chat_template = INST.replace("' ' + m.content.strip() + ' '", "m.content")
    model = kit.build("llama", {"vocab_size": len(words), "max_position_embeddings": 2048})
    n_bytes = 256
    with torch.no_grad():  # it writes words alone
        model.lm_head.weight[: len(SPECIAL) + n_bytes] = 0.0
        model.lm_head.weight[-4:] = 0.0
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture
def spaced(folder, tmp_path):
    told = {"prefix_cache": False, "learn": "retrieved", "max_tokens": 8, "min_chunk_tokens": 6}
    with Engine(
        Settings(
            model=str(folder), dtype="float32", store=tmp_path / "store", home=tmp_path, **told
        )
    ) as made:
        yield made


def said(engine, ids):
    return str(engine.model.tokenizer.decode(list(ids), skip_special_tokens=False))


def own(engine, told, **more):
    """The ids of what the template writes."""
    words = engine.model.tokenizer
    text = words.apply_chat_template(
        told, tokenize=False, **{"add_generation_prompt": True, **more}
    )
    return list(words(str(text), add_special_tokens=False).input_ids)


def joined(prompt):
    return [
        {
            "role": role,
            "content": "".join(part if isinstance(part, str) else part.text for part in content),
        }
        for role, content in prompt
    ]


def kinds(prompt):
    return [segment.kind for segment in prompt.segments]


def test_a_prompt_has_the_ids_of_its_template_with_chunks_in_it_or_without(spaced):
    wanted, marked = own(spaced, joined(messages())), spaced.prompt(messages())
    assert kinds(marked).count("chunk") == len(CHUNKS)
    spaced.ingest([(text, "book") for text in CHUNKS])
    plain = spaced.prompt([("user", joined(messages())[0]["content"])])
    for prompt in (marked, plain, spaced.prompt(messages(), ask=Ask(reuse=False))):
        assert list(prompt.token_ids) == wanted
    assert spaced.answer(messages(), Ask(reuse=False)).trace.tokens == len(wanted)


def test_ingested_chunks_are_found_in_text_and_in_token_ids(spaced):
    spaced.ingest([(text, "book") for text in CHUNKS])
    text = joined(messages())[0]["content"]
    for asked in ([("user", text)], own(spaced, joined(messages()))):
        found = [each for each in spaced.prompt(asked).segments if each.kind == "chunk"]
        assert len(found) >= len(CHUNKS)
        n_found = sum(len(segment.tokens) for segment in found)
        assert n_found >= 0.9 * sum(len(spaced.tokens(chunk)) for chunk in CHUNKS)
    assert spaced.answer(asked).trace.tokens_chunks > 0


def test_a_conversation_goes_on_with_the_ids_of_its_answers_and_reads_as_its_template_writes(
    spaced,
):
    first = spaced.answer([("user", "Who counted forty ships?")], Ask(session="one"))
    spaced.flush()
    answer = spaced.answer([("user", "And what is its door like?")], Ask(session="one"))
    told = [
        ("user", "Who counted forty ships?"),
        ("assistant", [Piece(first.text, ids=first.token_ids)]),
        ("user", "And what is its door like?"),
    ]
    prompt = spaced.prompt(told)
    assert said(spaced, prompt.token_ids) == said(spaced, own(spaced, joined(told)))
    assert answer.trace.tokens == len(prompt.token_ids)
    assert answer.trace.history_reused > 0


def test_a_prompt_over_a_schema_reads_as_the_template_writes_it(spaced):
    schema = (
        f"<schema name='s'><user>Read this. <module name='m'>{CHUNKS[0]}</module></user></schema>"
    )
    spaced.schemas.register(schema)
    prompt = spaced.prompt(parse_prompt("<prompt schema='s'><m/> Who?</prompt>"))
    told = [{"role": "user", "content": f"Read this. {CHUNKS[0]} Who?"}]
    assert _read(said(spaced, prompt.token_ids)) == _read(said(spaced, own(spaced, told)))


def _read(text):
    return text.replace(" [/INST]", "[/INST]")


# token ids


def test_token_ids_are_read_as_they_are(spaced):
    ids = own(spaced, joined(messages()))
    assert list(spaced.prompt(ids).token_ids) == ids
    assert spaced.answer(ids).token_ids == spaced.answer(messages(), Ask(reuse=False)).token_ids
    assert "".join(spaced.stream(ids)) == spaced.answer(ids).text
    first, _ = spaced.batch([ids, ids[:-3]])
    assert first.token_ids == spaced.answer(ids).token_ids


@pytest.mark.parametrize("ids", [[1, -1], [1, 10**6], [1, "a"], [1, 2.5]])
def test_token_ids_that_the_tokenizer_does_not_have_are_refused(engine, ids):
    with pytest.raises(InputError, match=r"whole numbers from 0"):
        engine.prompt(ids)


def test_token_ids_have_no_tools_and_no_session(engine):
    tool = {"type": "function", "function": {"name": "find", "parameters": {}}}
    for ask in (Ask(session="one"), Ask(tools=[tool])):
        with pytest.raises(InputError, match="token ids cannot have tools"):
            engine.answer([1, 2, 3], ask)


# what the template is told beside messages


@pytest.fixture
def thinking(spaced):
    spaced.model.tokenizer.chat_template = THINKS
    return spaced


def test_the_template_sees_its_own_variables(thinking):
    for more in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        prompt = thinking.prompt([("user", "Why?")], ask=Ask(chat_template_kwargs=more))
        assert list(prompt.token_ids) == own(
            thinking, [{"role": "user", "content": "Why?"}], **more
        )
    answer = thinking.answer(
        [("user", "Why?")], Ask(chat_template_kwargs={"enable_thinking": False})
    )
    assert answer.trace.tokens > thinking.answer([("user", "Why?")]).trace.tokens


@pytest.mark.parametrize("name", ["chat_template", "tools", "tokenize", "add_generation_prompt"])
def test_what_is_no_variable_of_a_template_is_refused(name):
    with pytest.raises(SettingsError, match=name):
        Ask(chat_template_kwargs={name: 1})
