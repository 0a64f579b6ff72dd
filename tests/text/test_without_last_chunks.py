"""Which chunks are left out of contents, and that nothing else is: no question, and no word that
stands around them.
"""

import pytest

from ragfuse.text import Piece
from ragfuse.text.chat_messages import without_last_chunks

C = tuple(Piece(f"chunk {name}", "chunk", f"{name}.md") for name in "abcde")


def text(pieces):
    return "".join(piece.text for piece in pieces)


def left(n, *pieces):
    contents, sources = without_last_chunks(
        [[Piece(each) if isinstance(each, str) else each for each in pieces]], n
    )
    return text(contents[0]), tuple(sources)


@pytest.mark.parametrize(
    ("n", "wanted", "sources"),
    [
        (1, "Say.\n\nchunk a\n\nchunk b\n\nWho?", ("c.md",)),
        (2, "Say.\n\nchunk a\n\nWho?", ("b.md", "c.md")),
        (3, "Say.\n\nWho?", ("a.md", "b.md", "c.md")),
        (9, "Say.\n\nWho?", ("a.md", "b.md", "c.md")),
    ],
)
def test_the_last_goes_first_with_the_space_that_parted_it(n, wanted, sources):
    pieces = ("Say.\n\n", C[0], "\n\n", C[1], "\n\n", C[2], "\n\n", "Who?")
    assert left(n, *pieces) == (wanted, sources)


@pytest.mark.parametrize("gap", ["\n---\n", "\n[2] ", "', '", "\n\n2. ", ""])
def test_what_parts_chunks_without_a_letter_goes_with_them(gap):
    assert left(1, "['", C[0], gap, C[1], "']\nWho?")[0] == "['chunk a']\nWho?"


def test_what_parts_all_chunks_alike_goes_with_them():
    pieces = ("<doc>", C[0], "</doc>\n<doc>", C[1], "</doc>\n<doc>", C[2], "</doc>\nWho?")
    assert left(1, *pieces)[0] == "<doc>chunk a</doc>\n<doc>chunk b</doc>\nWho?"
    assert left(2, *pieces)[0] == "<doc>chunk a</doc>\nWho?"


def test_words_between_chunks_stay():
    pieces = ("Read: ", C[0], "\n\nThen compare it with ", C[1], "\n\nWho?")
    assert left(1, *pieces)[0] == "Read: chunk a\n\nThen compare it with Who?"
    assert left(2, *pieces)[0] == "Read: \n\nThen compare it with Who?"


def test_words_are_never_joined():
    assert left(1, "Given ", C[0], "answer")[0] == "Given answer"


def test_chunks_of_several_messages_go_from_the_end():
    contents = [[C[0], Piece("\n\nWho?")], [Piece("The keeper.")], [C[1], Piece("\n\nWhy?")]]
    assert [text(each) for each in without_last_chunks(contents, 1, question=2)[0]] == [
        "chunk a\n\nWho?",
        "The keeper.",
        "\n\nWhy?",
    ]
    assert without_last_chunks(contents, 2, question=2)[1] == ["a.md", "b.md"]


def test_a_question_that_is_itself_a_chunk_stays():
    contents = [[Piece("Say.\n"), C[0]], [C[1], Piece("\n")]]
    assert [text(each) for each in without_last_chunks(contents, 9, question=1)[0]] == [
        "Say.\n",
        "chunk b\n",
    ]
    assert without_last_chunks([[C[0]]], 9)[1] == []


def test_documents_in_a_message_of_their_own_go():
    contents = [[Piece("Who?")], [C[0], Piece("\n\n"), C[1]]]
    assert [text(each) for each in without_last_chunks(contents, 1, question=0)[0]] == [
        "Who?",
        "chunk a",
    ]
    assert [text(each) for each in without_last_chunks(contents, 2, question=0)[0]] == ["Who?", ""]
