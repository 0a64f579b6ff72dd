"""Looking for marks and known texts is linear in what is searched, whatever is written there and whatever is known."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfuse.text import KnownChunks, Marker, Piece, beginnings
from ragfuse.text.altered import MAX_COMPARED_TEXTS, altered
from ragfuse.text.chat_messages import ChatMessage, LaterMessages
from ragfuse.text.fingerprints import MODULUS, EvaluationPoint, Fingerprints, Residues, residue, secret_prime
from ragfuse.text.fit import drop_last_chunks
from tests.text.operations import MOST_GROWTH, Hashed, lines
from tests.text.test_chunks import found, known_with

SECRET = bytes(range(32))
MARKER = Marker(SECRET)
HEAD = re.compile(r"\[\[chunk:([0-9]{1,9}):([A-Za-z0-9_-]*):([0-9a-f]{32})\]\]")


@pytest.fixture(scope="module", autouse=True)
def one_point() -> Iterator[None]:
    """Evaluate fingerprints at the same points in every run.

    A random point lets one place in a thousand look like a text's beginning by chance. In a prompt that repeats itself
    that is every place, and the steps of one search are several times another's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beginnings.secrets, "randbelow", random.Random(0).randrange)
        yield


# marks


def heads_before_one_foot(n: int) -> str:
    """Each head's length leads to the same foot."""
    tag, size = "0" * 32, len("[[chunk:0000000::" + "0" * 32 + "]]")
    count = n // size
    return "".join(f"[[chunk:{(count - 1 - i) * size:07d}::{tag}]]" for i in range(count)) + f"[[end:{tag}]]"


def heads_and_feet_at_one_distance(n: int, genuine: bool = True) -> str:
    """A head that was signed again and again, each with a foot of its own where its text would end."""
    pitch, size = 80, n // 160
    length = size * pitch - len(f"[[chunk:{size * pitch}::{'0' * 32}]]")
    marked = MARKER.mark("y" * length)
    head = marked[: -length - len("[[end:]]") - 32] if genuine else f"[[chunk:{length}::{'f' * 32}]]"
    foot = marked[len(head) + length :] if genuine else f"[[end:{'f' * 32}]]"
    return head.ljust(pitch) * size + foot.ljust(pitch) * size


def nested(n: int) -> str:
    """Marks in marks, all of them signed."""
    text = "x" * (n // 2)
    while len(text) < n:
        text = MARKER.mark(text)
    return text


FORGED: dict[str, Callable[[int], str]] = {
    "heads before one foot": heads_before_one_foot,
    "a signed head again and again": heads_and_feet_at_one_distance,
    "an unsigned head again and again": lambda n: heads_and_feet_at_one_distance(n, genuine=False),
    "signed marks in signed marks": nested,
    "signed marks beside each other": lambda n: MARKER.mark("a chunk") * (n // 90),
    "beginnings of heads": lambda n: "[[chunk:1:" * (n // 10),
    "a name without end": lambda n: "[[chunk:1:" + "A" * n,
    "nothing but brackets": lambda n: "[" * n,
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED.keys())
def test_marks_are_split_in_linear_time_however_they_overlap(forged, monkeypatch):
    work = []
    for n in (4_000, 32_000):
        text = forged(n)
        with Hashed().counted(monkeypatch) as hashed:
            steps = lines(lambda text=text: MARKER.split(text))
        assert hashed.nbytes <= 4 * len(text) + 1000
        work.append((steps + hashed.nbytes) / len(text))
    assert work[1] <= work[0] * MOST_GROWTH / 8 + 0.1


def obvious_split(marker: Marker, text: str) -> list[Piece]:
    """Slow twin of `split`: whatever marking the enclosed text again gives, letter by letter, is a mark."""
    parts, done, at = list[Piece](), 0, 0
    while head := HEAD.search(text, at):
        at, stop = head.end(), head.end() + int(head[1])
        foot = f"[[end:{head[3]}]]"
        for source in ("", "s"):
            if stop <= len(text) and text[head.start() : stop + len(foot)] == marker.mark(text[at:stop], source):
                parts += [Piece(text[done : head.start()]), Piece(text[at:stop], "chunk", source)]
                done = at = stop + len(foot)
                break
    return [part for part in (*parts, Piece(text[done:])) if part.text]


@st.composite
def marked(draw: st.DrawFn) -> str:
    """Marks in and beside each other, their heads and feet torn apart and put together again."""
    texts = st.text("ab[é𝄞", max_size=5)
    parts = [draw(texts) for _ in range(3)]
    parts += [MARKER.mark(part, draw(st.sampled_from(["", "s"]))) for part in parts]
    parts += [MARKER.mark("".join(draw(st.permutations(parts[:5]))), "s")]
    heads = [head.group() for part in parts for head in HEAD.finditer(part)]
    feet = [part[-len("[[end:]]") - 32 :] for part in parts if part.endswith("]]")]
    return "".join(draw(st.lists(st.sampled_from([*parts, *heads, *feet, "[[end:"]), max_size=8)))


@settings(max_examples=300, deadline=None)
@given(marked())
def test_split_finds_what_an_obvious_search_does(text: str):
    assert MARKER.split(text) == obvious_split(MARKER, text)


# fingerprints


@given(st.text("ab\0\ud800é𝄞"), st.data())
def test_a_fingerprint_of_a_part_is_that_of_the_part_alone(text: str, data: st.DataObject):
    cuts = data.draw(st.lists(st.integers(0, len(text)), min_size=1))
    prime, point = secret_prime(SECRET), EvaluationPoint(123_456_789_123)
    residues, prints = Residues(text, cuts, prime), Fingerprints(text, point)
    for lo in cuts:
        for hi in (cut for cut in cuts if cut >= lo):
            assert residues.of(lo, hi) == residue(text[lo:hi], prime)
            [found] = prints.of(np.array([lo]), np.array([hi - lo])).tolist()
            powers = (pow(123_456_789_123, i, MODULUS) * (ord(letter) + 1) for i, letter in enumerate(text[lo:hi]))
            assert found == point.fingerprint(text[lo:hi]) == sum(powers) % MODULUS


def test_fingerprints_everywhere_are_those_of_every_part():
    text = "the cat sat on the mat \U0010ffff" * 40
    prints, point = Fingerprints(text, EvaluationPoint(MODULUS - 2)), EvaluationPoint(MODULUS - 2)
    for size in (1, 24, len(text)):
        wanted = [point.fingerprint(text[lo : lo + size]) for lo in range(len(text) - size + 1)]
        assert prints.of_size(size).tolist() == wanted
    assert prints.of_size(len(text) + 1).tolist() == []


def test_long_texts_are_summed_without_overflow():
    text, point = "\U0010ffff" * 300_000, EvaluationPoint(MODULUS - 1)  # -1: letters cancel out two by two
    prints = Fingerprints(text, point)
    assert prints.of(np.array([0, 1]), np.array([299_999, 299_998])).tolist() == [0x110000, 0]


@pytest.mark.parametrize("number", range(5))
def test_the_secret_prime_is_a_prime_of_128_bits_and_its_key_s_own(number: int):
    prime = secret_prime(bytes([number]) * 32)
    assert prime.bit_length() == 128
    assert prime == secret_prime(bytes([number]) * 32) != secret_prime(bytes([number + 1]) * 32)
    for base in range(3, 60):
        assert pow(base, prime - 1, prime) == 1
    assert all(prime % small for small in range(2, 5000))


# known texts


def fibonacci(n: int) -> str:
    """The word of two letters that repeats itself most without ever being periodic."""
    one, two = "- ", "-- "
    while len(two) < n:
        one, two = two, two + one
    return two[:n]


def obvious_search(texts: list[str], text: str) -> list[str]:
    """Slow twin of `find`: at each place all texts are tried."""

    def is_letter(place: int) -> bool:
        letter = text[place : place + 1] if place >= 0 else ""
        return (letter.isalnum() or letter == "_") and letter < "\u0e00"

    hits, at = [], 0
    while at < len(text):
        fits = [each for each in texts if text.startswith(each, at) and not (is_letter(at - 1) and is_letter(at))]
        fits = [each for each in fits if not (is_letter(at + len(each) - 1) and is_letter(at + len(each)))]
        hits += [max(fits, key=len)] if fits else []
        at += len(hits[-1]) if fits else 1
    return hits


KNOWN: dict[str, Callable[[int], list[str]]] = {
    "with one beginning": lambda n: ["a " * 12 + "b" * i for i in range(1, n)],
    "beginnings of one another": lambda n: ["- " * i for i in range(12, n)],
    "each a letter longer than the one before": lambda n: ["中" * i for i in range(24, n)],
    "ends in words": lambda n: [("aa." * n)[: 3 * i + 1] for i in range(9, n)],
    "alike but for the end": lambda n: ["- " * 300 + f"end {i}" for i in range(n)],
    "beginnings of Fibonacci's word": lambda n: [fibonacci(i) for i in range(24, n)],
}
PROMPTS: dict[str, Callable[[int], str]] = {
    "the one beginning again and again": lambda n: ("a " * 12 * n)[:n],
    "dashes": lambda n: ("- " * n)[:n],
    "one letter": lambda n: "中" * n,
    "words in one": lambda n: ("aa." * n)[:n],
    "nearly a known text again and again": lambda n: (("- " * 300 + "end! ") * n)[:n],
    "Fibonacci's word": fibonacci,
}


def searched(known: KnownChunks, text: str) -> int:
    """Steps of a search that has been made before: what is known is read once."""
    known.find(text)
    return lines(lambda: known.find(text)) + known._beginnings.steps


@pytest.fixture(scope="module", params=KNOWN)
def crowds(request: pytest.FixtureRequest) -> tuple[KnownChunks, KnownChunks]:
    """Few known texts that are alike, and sixteen times as many."""
    few, many = (known_with(*KNOWN[request.param](n)) for n in (100, 1600))
    return few, many


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_known_texts_are_sought_in_linear_time_whatever_a_prompt_repeats(crowds, prompt):
    few, _ = crowds  # the longest of them is much shorter than the prompts
    short, long = prompt(4_000), prompt(32_000)
    assert searched(few, long) <= MOST_GROWTH * searched(few, short)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_a_search_takes_a_step_for_each_bit_of_a_length_however_many_texts_begin_alike(crowds, prompt):
    few, many = crowds
    text = prompt(8_000)
    assert searched(many, text) <= 100 * len(text)
    # longer texts have up to four bits more, of some eight
    assert searched(many, text) <= 1.6 * searched(few, text)


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN.keys())
def test_what_is_known_is_read_in_linear_time(known):
    work = []
    for n in (100, 800):
        texts = known(n)
        chunks = known_with(*texts)
        text = max(texts, key=len)
        work.append(lines(lambda chunks=chunks, text=text: chunks.find(text)) / sum(map(len, texts)))
    assert work[1] <= work[0] * MOST_GROWTH / 8


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN.keys())
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_of_crowds_just_what_an_obvious_search_finds_is_found(known, prompt):
    texts, text = known(90), prompt(700)
    assert found(known_with(*texts), text) == obvious_search(
        [each.strip() for each in texts if len(each.strip()) >= 24], text
    )


TEXTS = st.one_of(
    st.text("a.", min_size=3, max_size=14).map(str.strip),
    st.integers(3, 40).map(lambda n: "中" * n),
    st.integers(3, 40).map(lambda n: ("aa. " * 10)[:n].strip()),
    st.integers(3, 60).map(fibonacci).map(str.strip),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "add", "discard", "find"]), TEXTS), max_size=30),
    st.lists(TEXTS, max_size=6).map(" ".join),
)
def test_adding_discarding_and_seeking_in_any_order_is_like_an_obvious_search(steps, text: str):
    known, left = KnownChunks(min_chars=3), dict[str, None]()
    for what, each in steps:
        if what == "add":
            known.add([each])
            if len(each) >= 3:
                left[each] = None
        elif what == "discard" and left:
            gone = next(iter(left))
            [id] = KnownChunks().add([gone])
            known.discard([id])
            del left[gone]
        else:
            assert found(known, each) == obvious_search(list(left), each)
    assert found(known, text) == obvious_search(list(left), text)


def test_nothing_is_left_behind_of_texts_that_were_found_and_discarded():
    known = KnownChunks()
    ids = known.add(KNOWN["beginnings of one another"](60))
    known.find("- " * 100)
    known.discard(ids)
    assert [kept for kept in vars(known._beginnings).values() if isinstance(kept, dict)] == [{}, {}, {}, {}]


def test_two_texts_with_one_fingerprint_are_told_apart(monkeypatch):
    """A fingerprint is never believed: where all are one, nothing is found that is not there."""
    monkeypatch.setattr(Fingerprints, "of", lambda self, places, sizes: np.ones(len(places), np.uint64))
    known = known_with("the first of two known texts", "the first of two known things")
    spans = found(known, "Say: the first of two known texts. Or the first of two known birds?")
    assert set(spans) <= {"the first of two known texts"}


# what is left out, and joined


def messages(n: int) -> list[ChatMessage]:
    return [ChatMessage(role, "text") for _ in range(n) for role in ("user", "assistant")]


WORK: dict[str, tuple[Callable[[int], object], Callable[[object], object]]] = {
    "chunks without text between": (
        lambda n: [[Piece("c", "chunk")] * n + [Piece("q")]],
        lambda contents: drop_last_chunks(contents, len(contents[0]) // 2),
    ),
    "chunks with space between": (
        lambda n: [[Piece("c", "chunk"), Piece(" ")] * n + [Piece("q")]],
        lambda contents: drop_last_chunks(contents, len(contents[0]) // 4),
    ),
    "chunks in many messages": (
        lambda n: [[Piece("q"), Piece("c", "chunk")] for _ in range(n)],
        lambda contents: drop_last_chunks(contents, len(contents)),
    ),
    "many messages of one role": (lambda n: [ChatMessage("user", "hello")] * n, ChatMessage.joined),
    "many turns to leave out": (messages, LaterMessages),
}


@pytest.mark.parametrize(("make", "use"), WORK.values(), ids=WORK.keys())
def test_leaving_out_and_joining_is_linear(make, use):
    short, long = make(200), make(1600)
    assert lines(lambda: use(long)) <= MOST_GROWTH * lines(lambda: use(short))


def test_turns_that_may_be_left_out_take_no_more_memory_than_the_turns():
    later = LaterMessages(messages(2000))
    assert len(later) == 1999
    assert sum(len(kept) for kept in vars(later).values() if isinstance(kept, list)) <= 2 * 4000
    assert [turn.role for turn in later[1998]] == ["user", "assistant"]


def test_joining_copies_each_part_once():
    class Parts(list):
        copied = 0

        def __iter__(self):
            Parts.copied += len(self)
            return super().__iter__()

    ChatMessage.joined([ChatMessage("user", Parts(["a"])) for _ in range(500)])
    assert Parts.copied <= 2 * 500


def test_how_documents_were_altered_is_looked_for_in_a_few_of_them():
    class Prompt(str):
        looks = 0

        def __contains__(self, text):
            Prompt.looks += 1
            return super().__contains__(text)

    text = "one two three four five six seven eight nine ten"
    prompt = Prompt(f"say: {text.replace(' ', '  ')}")
    assert altered(prompt, [text] * 1000) == f"{MAX_COMPARED_TEXTS} of {MAX_COMPARED_TEXTS} with other white space"
    assert Prompt.looks <= 5 * MAX_COMPARED_TEXTS
