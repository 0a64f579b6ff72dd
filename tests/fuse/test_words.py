"""How near rows are to words of the question."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.fuse.select import nearness
from tests import reference
from tests.hf import kit


def near(words: list[int], asked: list[int], offer: list[int]) -> list[float]:
    found = nearness(torch.tensor(words), torch.tensor(asked, dtype=torch.int64), torch.tensor(offer))
    assert found.dtype == torch.float32
    return found.tolist()


@given(words=st.lists(st.integers(-1, 6), min_size=3, max_size=90), cut=st.floats(0.1, 0.9), skip=st.integers(1, 4))
def test_it_agrees_with_its_twin(words: list[int], cut: float, skip: int) -> None:
    stop = max(1, round(cut * len(words)))
    offer, asked = list(range(0, stop, skip)), list(range(stop, len(words)))
    assert near(words, asked, offer) == pytest.approx(reference.nearness(words, asked, offer), abs=1e-5)


def test_a_rare_word_weighs_more_and_what_is_far_weighs_nothing() -> None:
    words = [1, *[-1] * 29, 1, *[-1] * 39, 2, *[-1] * 60, 1, 2, 3]
    found = near(words, [131, 132, 133], list(range(131)))
    assert found[70] > found[0] == found[30] > found[1] > 0
    assert found[100] == 0
    assert found[69] == pytest.approx(found[71]) == pytest.approx(found[70] * 2.718281828 ** (-1 / 6))


def test_no_shared_word_is_no_nearness() -> None:
    assert near([1, 2, 3, 4], [3], [0, 1, 2]) == [0.0] * 4
    assert near([-1, -1, -1], [2], [0, 1]) == [0.0] * 3


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [("\u0120Paris", "paris", True), ("\u2581Paris", "\u0120PARIS", True), ("a", "b", False), ("...", "a", False)],
)
def test_a_word_is_the_same_in_any_case_and_at_the_start_of_a_text(
    first: str, second: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kit.HFModel(kit.build("llama", {}), kit.tokenizer())
    said = {5: first, 6: second}
    monkeypatch.setattr(model.tokenizer, "convert_ids_to_tokens", said.__getitem__)
    assert (model._word(5) == model._word(6)) == same


def test_signs_are_no_words_and_a_model_without_a_tokenizer_counts_ids() -> None:
    model = kit.HFModel(kit.build("llama", {}), kit.tokenizer())
    assert model._word(ord(".")) == -1
    bare = kit.HFModel(kit.build("llama", {}))
    assert bare._word(7) == bare._word(7) != bare._word(8)
