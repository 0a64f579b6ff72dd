"""Questions made by rules from encyclopaedia passages: what a sentence's shape says can be asked
and answered.

Pure text. Each rule reads a shape that Wikipedia sentences have ("X (born DATE) is a NATION TRADE")
and asks for what fills it; the answer always stands in the passage word for word. Rules are few and
strict: a wrong question does more harm than a missing one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATE = rf"(?:\d{{1,2}} (?:{MONTHS}),? \d{{3,4}}|(?:{MONTHS}) \d{{1,2}}, \d{{3,4}}|\d{{4}})"
NAME_PART = r"(?:[A-Z][\w.'-]*|de|von|van|of|the|di|da|del|la|le|al)"
PERSON = rf"[A-Z][\w.'-]+(?: {NAME_PART}){{0,3}} [A-Z][\w'-]+|[A-Z][\w.'-]+ [A-Z][\w'-]+"
PRONOUNS = frozenset(
    ("it", "he", "she", "they", "this", "that", "these", "those", "there", "his", "her", "its")
) | frozenset(("their", "who", "which", "we", "i", "you", "one"))


@dataclass(frozen=True)
class Passage:
    """A text under a title, as it may be retrieved."""

    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question and an answer that stands in the passage."""

    question: str
    answer: str


Rule = Callable[[Passage], Iterator[Question]]


def questions(passage: Passage) -> list[Question]:
    """All that the rules can ask about `passage`, in the order of the rules, each question once."""
    found: dict[str, Question] = {}
    for rule in RULES:
        for question in rule(passage):
            answer = question.answer.strip(" ,;")
            if answer and answer in passage.text and len(answer.split()) <= 10:
                found.setdefault(question.question, Question(question.question, answer))
    return list(found.values())


def tidy(text: str) -> str:
    """`text` without the blanks that tokenised sources leave around brackets, quotes and
    hyphens.
    """
    text = re.sub(r"(?<=[\w.])\(", " (", re.sub(r"\( +", "(", text))
    text = re.sub(r"(?<=\w)- (?=\w)", "-", text)
    text = re.sub(r'(?<=\w)" (?=\w[^"]*")', ' "', re.sub(r'(^|\s)" +', r'\1"', text))
    return re.sub(r" +([,.;)])", r"\1", " ".join(text.split()))


def _subject(passage: Passage) -> str:
    return re.sub(r" \([^)]*\)$", "", passage.title)


def _life(passage: Passage) -> Iterator[Question]:
    name = _subject(passage)
    life = re.search(rf"\((?:[^()]*?[;,] )??({DATE}) ?[\u2013-] ?({DATE})\)", passage.text[:250])
    if life:
        yield Question(f"When was {name} born?", life[1])
        yield Question(f"When did {name} die?", life[2])
    born = re.search(
        rf"\(born (?:[^()]*?, )??({DATE})(?: in ([A-Z][\w ,]+?))?[,)]", passage.text[:250]
    )
    if born:
        yield Question(f"What is the date of birth of {name}?", born[1])
        if born[2]:
            yield Question(f"Where was {name} born?", born[2])


def _trade(passage: Passage) -> Iterator[Question]:
    pattern = (
        r"(?:\) |^[^.(]{3,60} )(is|was) an? ((?:[A-Z][a-z]+(?:-[A-Z][a-z]+)? )+)([a-z][a-z ,-]+?)"
        r"(?:\.| who| from| for| by| in | of | with|, known)"
    )
    said = re.search(pattern, passage.text[:300])
    if said and re.search(rf"\([^)]*{DATE}", passage.text[:200]):
        name, (verb, nation, trade) = _subject(passage), said.groups()
        yield Question(f"What nationality {verb} {name}?", nation.strip())
        yield Question(f"What {verb} {name}'s profession?", trade)


def _film(passage: Passage) -> Iterator[Question]:
    name, text = _subject(passage), passage.text[:500]
    film = re.search(r"is an? (\d{4}) ((?:[A-Z][a-z-]+ )*)((?:[a-z-]+ )*(?:film|movie))\b", text)
    if not film:
        return
    yield Question(f"In which year did the film {name} come out?", film[1])
    if film[3] not in ("film", "movie"):
        yield Question(f"What kind of film is {name}?", film[3])
    if film[2].strip():
        yield Question(f"From which country is the film {name}?", film[2].strip())
    asked = {
        "directed": "Who directed {}?",
        "produced": "Who produced {}?",
        "written": "Who wrote the film {}?",
    }
    for verb, question in asked.items():
        by = re.search(rf"\b{verb} by ({PERSON})(?=[ ,.])(?! and)", text)
        if by:
            yield Question(question.format(name), by[1].removesuffix(" The").rstrip("."))
    star = re.search(rf"\bstar(?:s|ring) ({PERSON})(?=[,.]| and| in )", text)
    if star:
        yield Question(f"Who plays the leading part in {name}?", star[1])


def _family(passage: Passage) -> Iterator[Question]:
    said = re.search(
        rf"\b(is|was) (?:the|a) ((?:\w+ ){{0,2}}(?:son|daughter)) of ({PERSON})", passage.text[:400]
    )
    if said and said.start() < 150:
        yield Question(f"Who {said[1]} the parent of {_subject(passage)}?", said[3])
    wed = re.search(rf"\b(?:He|She) (?:was )?married(?: to)? ({PERSON})", passage.text)
    if wed:
        yield Question(f"Whom did {_subject(passage)} marry?", wed[1])


def _place(passage: Passage) -> Iterator[Question]:
    name = _subject(passage)
    lies = (
        r"\b(is|was|are) (?:a \w+ )?(?:located|situated) in ((?:the )?[A-Z][^.;()]{3,50}?)(?=[.;]|"
        r" and | at )"
    )
    where = re.search(lies, passage.text)
    if where and where.start() < 200:
        yield Question(f"Where {where[1]} {name} located?", where[2])
    head = re.search(r"[Tt]he population was ([\d,]+\d)", passage.text)
    if head:
        yield Question(f"What is the population of {name}?", head[1])
    plays = r"\b(?:plays|playing) (?:as an? [\w ]+ )?for ((?:[A-Z][\w.'-]*)(?: [A-Z][\w.'-]*){0,3})"
    club = re.search(plays, passage.text)
    if club:
        yield Question(f"Which team does {name} play for?", club[1])


def _sentences(passage: Passage) -> Iterator[str]:
    yield from re.split(r"(?<=[a-z0-9)][.]) (?=[A-Z])", passage.text)


def _passive(passage: Passage) -> Iterator[Question]:
    """The X was built in 1850 by Y: when, and by whom."""
    for sentence in _sentences(passage):
        done = r"(was|were) ((?:first |originally )?\w+(?:ed|lt|wn|nt|ade|eld|und))\b ?(.*)"
        said = re.match(rf"((?:The |An? )?[A-Z]?[\w' -]{{3,60}}?) {done}", sentence)
        if (
            not said
            or said[1].split()[0].lower() in PRONOUNS
            or not re.search(r"\b[A-Z]", said[1][1:])
        ):
            continue
        subject, verb, done, rest = said.groups()
        subject = (
            subject[0].lower() + subject[1:]
            if subject.startswith(("The ", "A ", "An "))
            else subject
        )
        when = re.search(rf"\b(?:in|on) ({DATE})\b", rest[:60])
        if when:
            between = rest[: when.start()].strip()
            if "," not in between:
                yield Question(
                    " ".join(f"When {verb} {subject} {done} {between}".split()) + "?", when[1]
                )
        by = re.match(rf"by ((?:the )?{PERSON})(?=[ ,.])", rest)
        if by:
            yield Question(f"By whom {verb} {subject} {done}?", by[1])
        where = re.match(r"(?:at|in) ((?:the )?[A-Z][\w]+(?:,? [A-Z]\w+)*)(?=[,.]| in \d)", rest)
        if where and not re.match(MONTHS, where[1]):
            yield Question(f"Where {verb} {subject} {done}?", where[1])


def _dated(passage: Passage) -> Iterator[Question]:
    """In 1850, the X was ... : in what year was the X ...?"""
    for sentence in _sentences(passage):
        what = r"((?:the |an? )?[\w' -]{3,50}?) (was|were) ([\w' -]{4,80}?)(?=[,.;])"
        said = re.match(rf"[IO]n ((?:\w+ )?\d{{4}}),? {what}", sentence)
        if said and re.search(r"[A-Z]", said[2]) and " and " not in said[4]:
            yield Question(f"When {said[3]} {said[2]} {said[4]}?", said[1])


def _blank(passage: Passage) -> Iterator[Question]:
    """A name or a number of a sentence left out."""
    for sentence in _sentences(passage):
        words = sentence.split()
        if not 8 <= len(words) <= 30 or sentence.split()[0].lower() in PRONOUNS:
            continue
        named = (
            r"(?<=[a-z,] )(?:[A-Z][a-z]+(?: [A-Z][a-z]+)+|\d{4}|\d+ (?:million|percent|km))(?=["
            r" ,.])"
        )
        gaps = list(re.finditer(named, sentence))
        if gaps:
            gap = random.Random(sentence).choice(gaps)
            yield Question(
                f"What stands for the blank: {sentence[: gap.start()]}____{sentence[gap.end() :]}",
                gap[0],
            )


RULES: tuple[Rule, ...] = (_life, _trade, _film, _family, _place, _passive, _dated, _blank)
