"""Rules ask only what the passage answers word for word, and leave alone what they do not
understand.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.rules import Passage, questions

PASSAGES = [
    (
        "Frank Tuttle",
        "Frank Tuttle (August 6, 1892 – January 6, 1963) was a Hollywood film director and writer.",
        {
            ("When was Frank Tuttle born?", "August 6, 1892"),
            ("When did Frank Tuttle die?", "January 6, 1963"),
        },
    ),
    (
        "Aas Ka Panchhi",
        "Aas Ka Panchhi is a 1961 Hindi movie. It is directed by Mohan Kumar.",
        {
            ("In which year did the film Aas Ka Panchhi come out?", "1961"),
            ("Who directed Aas Ka Panchhi?", "Mohan Kumar"),
            ("From which country is the film Aas Ka Panchhi?", "Hindi"),
        },
    ),
    (
        "Princess Yolanda",
        (
            "Princess Yolanda (1 June 1901 – 16 October 1986) was the eldest daughter of Victor"
            " Emmanuel."
        ),
        {("Who was the parent of Princess Yolanda?", "Victor Emmanuel")},
    ),
    (
        "Lima, Wisconsin",
        "Lima is a town in Pepin County. The population was 716 at the census.",
        {("What is the population of Lima, Wisconsin?", "716")},
    ),
]


@pytest.mark.parametrize(
    ("title", "text", "wanted"), PASSAGES, ids=[title for title, *_ in PASSAGES]
)
def test_what_the_sentence_says_is_asked(
    title: str, text: str, wanted: set[tuple[str, str]]
) -> None:
    found = {(each.question, each.answer) for each in questions(Passage(title, text))}
    assert wanted <= found


@given(st.text(), st.text())
def test_every_answer_stands_in_its_passage(title: str, text: str) -> None:
    for each in questions(Passage(title, text)):
        assert each.answer in text
        assert each.question.strip()
