"""What an engine reads is what its model's template writes: messages, texts, ids, schemas,
conversations.
"""

from __future__ import annotations

import pytest
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragfuse import Ask, Engine, InputError, Piece, Settings, SettingsError
from ragfuse.schemas.pml import parse_prompt
from tests.tiny import CHUNKS, INSTRUCTION, QUESTION, messages

INST = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}{% set c ="
    " c.split('</think>')[-1] %}{% endif %}{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{% if"
    " enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{%"
    " endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def _tokenizer(kind):
    core = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if kind == "legacy":
        core.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    back = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    core.decoder = decoders.Sequence(back)
    alphabet = ["▁", "\n", *map(chr, range(33, 127))]
    trainer = trainers.BpeTrainer(
        vocab_size=190, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet
    )
    core.train_from_iterator([*CHUNKS, INSTRUCTION, QUESTION] * 3, trainer)
    core.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="module", params=["first", "legacy", "always", "never"])
def folder(request, tmp_path_factory):
    """A random model over a tokenizer that may put a space before texts."""
    folder, tokenizer = tmp_path_factory.mktemp(request.param), _tokenizer(request.param)
    tokenizer.chat_template = INST
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(0.0, 1.2 * weight.shape[-1] ** -0.5)
            model.lm_head.weight[: len(SPECIAL)] = 0.0
            model.lm_head.weight[-2:] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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


def test_chunks_change_nothing_of_what_is_read(spaced):
    prompt = spaced.prompt(messages())
    assert kinds(prompt).count("chunk") == len(CHUNKS)
    assert list(prompt.token_ids) == own(spaced, joined(messages()))


def test_a_prompt_without_chunks_has_the_ids_of_its_template_and_so_has_one_without_reuse(spaced):
    wanted = own(spaced, joined(messages()))
    text = joined(messages())[0]["content"]
    assert list(spaced.prompt([("user", text)]).token_ids) == wanted
    spaced.ingest([(text, "book") for text in CHUNKS])
    assert list(spaced.prompt([("user", text)]).token_ids) == wanted
    assert list(spaced.prompt(messages(), ask=Ask(reuse=False)).token_ids) == wanted
    assert spaced.answer(messages(), Ask(reuse=False)).trace.tokens == len(wanted)


def test_a_text_has_the_ids_of_its_tokenizer(spaced):
    text = f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\n{QUESTION}"
    assert list(spaced.prompt(text).token_ids) == spaced.model.tokenizer(text).input_ids
    prompt = spaced.prompt(text, ask=Ask(documents=[(CHUNKS[0], "book")]))
    assert list(prompt.token_ids) == spaced.model.tokenizer(text).input_ids
    assert kinds(prompt)[-2:] == ["chunk", "fresh"]


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
    spaced.model.tokenizer.chat_template = CHATML
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


def test_thoughts_of_earlier_answers_go_as_the_template_lets_them(thinking):
    told = [
        ("user", "Why?"),
        ("assistant", "<think>Long and <|im_end|> deep.</think>So."),
        ("user", "Go </think> on."),
    ]
    prompt = thinking.prompt(told)
    assert "deep" not in said(thinking, prompt.token_ids)
    wanted = said(thinking, own(thinking, joined(told)))
    # some put a space behind a token, none is one
    assert said(thinking, prompt.token_ids).split() == wanted.split()
    words = thinking.model.tokenizer
    assert prompt.token_ids.count(words.convert_tokens_to_ids("</think>")) == 0
