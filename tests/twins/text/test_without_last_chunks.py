"""Which chunks are left out of contents, and that nothing else is: no question, and no word that
stands around them.
"""

import pytest

from ragfuse.text import Piece
from ragfuse.text.chat_messages import without_last_chunks

C = tuple(Piece(f"chunk {name}", "chunk", f"{name}.md") for name in "abc")
ALIKE = ("<doc>", C[0], "</doc>\n<doc>", C[1], "</doc>\n<doc>", C[2], "</doc>\nWho?")
SPACED = ("Say.\n\n", C[0], "\n\n", C[1], "\n\n", C[2], "\n\n", "Who?")
WORDS = ("Read: ", C[0], "\n\nThen compare it with ", C[1], "\n\nWho?")


def text(pieces):
    return "".join(piece.text for piece in pieces)


def left(n, *pieces):
    contents, _ = without_last_chunks(
        [[Piece(each) if isinstance(each, str) else each for each in pieces]], n
    )
    return text(contents[0])


@pytest.mark.parametrize(
    ("n", "pieces", "wanted"),
    [
        *(
            (1, ("['", C[0], gap, C[1], "']\nWho?"), "['chunk a']\nWho?")
            for gap in ("\n---\n", "\n[2] ", "', '", "\n\n2. ", "")
        ),
        (1, SPACED, "Say.\n\nchunk a\n\nchunk b\n\nWho?"),
        (9, SPACED, "Say.\n\nWho?"),
        (1, ALIKE, "<doc>chunk a</doc>\n<doc>chunk b</doc>\nWho?"),
        (2, ALIKE, "<doc>chunk a</doc>\nWho?"),
        (1, WORDS, "Read: chunk a\n\nThen compare it with Who?"),
        (2, WORDS, "Read: \n\nThen compare it with Who?"),
        (1, ("Given ", C[0], "answer"), "Given answer"),
    ],
)
def test_what_parts_chunks_goes_with_them_and_words_between_them_stay(n, pieces, wanted):
    """What has no letter, or parts all of them alike, is no word."""
    assert left(n, *pieces) == wanted


@pytest.mark.parametrize(
    ("n", "question", "contents", "wanted"),
    [
        (1, 2, [[C[0], "\n\nWho?"], ["He."], [C[1], "\n\nWhy?"]], "chunk a\n\nWho?|He.|\n\nWhy?"),
        (9, 1, [["Say.\n", C[0]], [C[1], "\n"]], "Say.\n|chunk b\n"),  # the question is a chunk
        (9, 0, [[C[0]]], "chunk a"),
        (1, 0, [["Who?"], [C[0], "\n\n", C[1]]], "Who?|chunk a"),
        (2, 0, [["Who?"], [C[0], "\n\n", C[1]]], "Who?|"),
    ],
)
def test_chunks_of_several_messages_go_from_the_end_and_the_question_stays(
    n, question, contents, wanted
):
    given = [[Piece(each) if isinstance(each, str) else each for each in row] for row in contents]
    found, _ = without_last_chunks(given, n, question=question)
    assert "|".join(map(text, found)) == wanted
