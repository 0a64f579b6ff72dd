"""Contexts come from the texts that come along; questions stand behind the passages that answer
them.
"""

from pathlib import Path

import pytest
from ragfuse_bench.codec.contexts import FOLLOW, held_out, read_contexts
from ragfuse_bench.presets import bench_model

from ragfuse.hf.model import HFModel


@pytest.fixture(scope="module")
def model(varied_path: Path) -> HFModel:
    return bench_model(str(varied_path), "float32", "cpu", varied_path)


def test_contexts_are_of_one_length_and_what_follows_is_their_own_next_tokens(
    model: HFModel,
) -> None:
    found = read_contexts(model, 2, 300)
    assert [context.dataset for context in found] == ["held-out"] * 2 + ["demo"] * 2
    assert all((len(context.token_ids), len(context.follow)) == (300, FOLLOW) for context in found)
    first = "\n\n".join(paragraph["context"].strip() for paragraph in held_out()[0]["paragraphs"])
    said = model.text((*found[0].token_ids, *found[0].follow))
    assert first.startswith(said)
