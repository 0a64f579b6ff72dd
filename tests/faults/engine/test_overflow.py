"""Prompts that are too long for their model are refused with the numbers."""

import json
import shutil

import pytest

from ragfuse import Ask, Engine, InputError
from ragfuse.errors import OverlongError
from tests.kits.tiny import CHUNKS, messages


@pytest.fixture
def narrow(varied_path, tmp_path, tiny_settings):
    """An engine whose model takes as many tokens as asked for."""
    engines = []

    def make(longest, **given):
        folder = tmp_path / f"narrow-{longest}"
        shutil.copytree(varied_path, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": longest})
        )
        engines.append(Engine(tiny_settings.model_copy(update={"model": str(folder), **given})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def length(engine, n):
    """Tokens of the prompt with the first n chunks."""
    return len(engine.prompt(messages(CHUNKS[:n])))


@pytest.fixture
def tight(narrow, engine):
    """An engine whose model takes just four chunks and an answer of 12 tokens."""
    return narrow(length(engine, 4) + 11)


def test_too_long_a_prompt_is_refused_with_the_numbers(tight, narrow, engine):
    longest, found = length(tight, 4) + 11, length(tight, 6)
    with pytest.raises(OverlongError, match=f"{longest:,} tokens.*{found:,}.*fewer or shorter"):
        tight.answer(messages())
    with pytest.raises(InputError, match="does not fit"):
        narrow(length(engine, 0) - 1).answer(messages(()))


def test_an_answer_that_does_not_fit_behind_its_prompt_is_refused_with_the_numbers(tight):
    asked = messages(CHUNKS[:4])
    whole = tight.answer(asked, Ask(max_tokens=12))
    assert len(whole.token_ids) == 12
    for ask in (Ask(max_tokens=13), Ask(options={"max_new_tokens": 13})):
        for door in (tight.answer, tight.plan):
            with pytest.raises(OverlongError, match=f"13 tokens.*{length(tight, 4):,}.*at most 12"):
                door(asked, ask)
