"""Scores of answers: exact match and F1 of normalised words, ROUGE-L of summaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ragfuse.calibration.case import Task, normalise
from ragfuse.calibration.stats import Interval, mean_interval


def exact(answer: str, golds: Sequence[str]) -> float:
    """Return SQuAD's EM: 1.0 where `answer` is a known answer except for case, punctuation and
    articles, else 0.0.
    """
    return float(any(normalise(answer) == normalise(gold) for gold in golds))


def f1(answer: str, golds: Sequence[str]) -> float:
    """Return the best word-level F1, 0..1, of `answer` against a known answer; 0 when there is
    none.
    """
    return max(
        (_overlap(normalise(answer).split(), normalise(g).split()) for g in golds), default=0.0
    )


def score(task: Task, text: str, golds: Sequence[str]) -> float:
    """Return the F1 of an answer, or the best ROUGE-L F-measure of a summary, with stemming (Lin,
    2004).
    """
    if task == "answer":
        return f1(text, golds)
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return max((float(scorer.score(gold, text)["rougeL"].fmeasure) for gold in golds), default=0.0)


def difference_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the 95% interval of the mean of the differences ours - theirs, question by
    question.
    """
    return mean_interval(np.subtract(ours, theirs).tolist())


def _overlap(words: Sequence[str], gold: Sequence[str]) -> float:
    """Return the F1 of two bags of words; 1 if both are empty."""
    if not words or not gold:
        return float(words == gold)
    common = (Counter(words) & Counter(gold)).total()
    return 2 * common / (len(words) + len(gold))
