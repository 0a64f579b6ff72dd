"""Examples come by number, ask about what they hold, and nothing of held-out documents is trained
on.
"""

import pytest

from ragfuse.adapt.examples import HELD_CHUNKS, MAX_QUESTIONS, DocumentExamples, split_chunks


def chunk(name: str, number: int) -> str:
    return (
        f"Chapter {number} of {name}. The tower of Port {name.title()}{number} was built in"
        f" {1700 + number} by Anna Marek{number} of Elling, and its keeper wrote {number * 7} ships"
        " into a book that is kept there."
    )


def documents(count: int, size: int) -> list[tuple[str, str]]:
    return [
        (chunk(name, i), f"books/{name}.txt") for name in "abcdefghij"[:count] for i in range(size)
    ]


@pytest.mark.parametrize(("count", "size"), [(1, 40), (3, 12), (8, 10), (5, 300), (10, 3)])
def test_a_part_of_the_documents_is_held_out(count, size):
    given = documents(count, size)
    train, held = split_chunks(given, 0)
    assert sorted(train + held) == sorted(given)
    assert HELD_CHUNKS <= len(held) <= len(given) // 2
    if count > 1:
        assert not {source for _, source in train} & {source for _, source in held}
    assert split_chunks(given, 0) == (train, held)


def test_an_example_comes_by_its_number_and_asks_about_what_it_holds():
    given = documents(4, 12)
    one, other = (DocumentExamples(given, 0) for _ in range(2))
    found = [one.example(number) for number in range(40)]
    assert [other.example(number) for number in reversed(range(40))] == found[::-1]
    assert [DocumentExamples(given, 1).example(number) for number in range(40)] != found
    known = [text for text, _ in given]
    assert {len(example.passages) for example in found} == {2, 3, 4, 5, 6}
    for example in found:
        assert len({*example.passages}) == len(example.passages)
        assert all(any(text in passage for text in known) for passage in example.passages)
        assert 4 <= len({*example.questions}) == len(example.questions) <= MAX_QUESTIONS
    asked = [question for example in found for question in example.questions]
    assert any(question.startswith("What is said about Port") for question in asked)
    assert any("have in common" in question for question in asked)
    assert any(question.startswith("What stands for the blank") for question in asked)
