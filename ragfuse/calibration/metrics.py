"""Scores of answers: exact match and F1 of normalised words, and ROUGE-L for summaries.

The normalisation is that of SQuAD's evaluation (Rajpurkar et al., 2016): lower case, no
punctuation, no articles, single spaces.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Return `text` in lower case, without punctuation and articles, with single spaces between
    words.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def is_right(answer: str, golds: Sequence[str]) -> bool:
    """Return whether `answer` contains a known answer as whole words; one that normalises to ""
    never counts.
    """
    text = f" {normalise(answer)} "
    return any(f" {gold} " in text for gold in map(normalise, golds) if gold)


def exact(answer: str, golds: Sequence[str]) -> float:
    """Return SQuAD's EM: 1.0 where `answer` is a known answer except for case, punctuation and
    articles, else 0.0.
    """
    return float(any(normalise(answer) == normalise(gold) for gold in golds))


def rouge_l(text: str, golds: Sequence[str]) -> float:
    """Return the best ROUGE-L F-measure, 0..1, of `text` against a known summary, with stemming
    (Lin, 2004).
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return max((float(scorer.score(gold, text)["rougeL"].fmeasure) for gold in golds), default=0.0)


def f1(answer: str, golds: Sequence[str]) -> float:
    """Return the best word-level F1, 0..1, of `answer` against a known answer; 0 when there is
    none.
    """
    return max(
        (_overlap(normalise(answer).split(), normalise(gold).split()) for gold in golds),
        default=0.0,
    )


def _overlap(words: Sequence[str], gold: Sequence[str]) -> float:
    """Return the F1 of two bags of words; 1 if both are empty."""
    if not words or not gold:
        return float(words == gold)
    common = (Counter(words) & Counter(gold)).total()
    return 2 * common / (len(words) + len(gold))
