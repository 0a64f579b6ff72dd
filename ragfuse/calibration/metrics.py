"""Whether an answer is right: known answers are looked for among normalised words.

The normalisation is that of SQuAD's evaluation (Rajpurkar et al., 2016): lower case, no
punctuation, no articles, single spaces.
"""

from __future__ import annotations

import re
import string
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
