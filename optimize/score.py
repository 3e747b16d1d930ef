"""Scores of answers: official LoCoMo and A-MEM paper.

The two F1 are different measures: a number without the name of its variant means nothing.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from functools import cache, lru_cache
from typing import Any, Final

from amem_dspy.errors import InvalidInputError

REFUSAL: Final = "No information available"
"""The reply that category 5 counts as right, in the words of the official evaluation."""

PAPER_SCORES: Final = ("exact_match", "f1", "bleu1", "rouge2_f", "rougeL_f")

_REFUSALS = (REFUSAL.lower(), "not mentioned")
_ARTICLES = re.compile(r"\b(a|an|the|and)\b")
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DOTS_TO_SPACES = str.maketrans(".,!?", "    ")
_Answer = str | int | None


def locomo_f1(prediction: _Answer, answer: _Answer, category: int) -> float:
    """Return the official LoCoMo score of a reply, in [0, 1].

    F1 over Porter-stemmed token multisets (snap-research/locomo, `task_eval/evaluation.py`).
    Category 1 splits both sides at commas and averages the best match over the gold parts, so
    extra parts cost nothing; category 3 keeps the gold up to the first `;`; category 5 is 1 for
    a reply that holds an official refusal, whatever the answer.
    """
    reply, gold = _text(prediction), _text(answer)
    if category == 5:
        return float(any(phrase in reply.lower() for phrase in _REFUSALS))
    if category == 1:
        parts = [_token_f1(gold_part, reply.split(",")) for gold_part in gold.split(",")]
        return sum(parts) / len(parts)
    if category not in (2, 3, 4):
        raise InvalidInputError(f"LoCoMo has the categories 1 to 5, got {category!r}")
    return _token_f1(gold.split(";")[0] if category == 3 else gold, [reply])


def paper_scores(prediction: _Answer, answer: _Answer) -> dict[str, float]:
    """Return the scores of the A-MEM paper's code (arXiv 2502.12110), each in [0, 1].

    Keys: exact_match, f1 (sets of lower-cased words), bleu1 (smoothing 1 of NLTK), rouge2_f,
    rougeL_f (stemmed). BLEU takes Treebank words without sentence splitting, which needs no
    download of NLTK data. An empty side scores 0 throughout.
    """
    reply, gold = _text(prediction).strip(), _text(answer).strip()
    if not reply or not gold:
        return dict.fromkeys(PAPER_SCORES, 0.0)
    rouge = _rouge_scorer().score(gold, reply)
    return {
        "exact_match": float(reply.lower() == gold.lower()),
        "f1": _set_f1(reply, gold),
        "bleu1": _bleu1(reply.lower(), gold.lower()),
        "rouge2_f": float(rouge["rouge2"].fmeasure),
        "rougeL_f": float(rouge["rougeL"].fmeasure),
    }


def _text(value: _Answer) -> str:
    return "" if value is None else str(value)


def _token_f1(gold: str, replies: list[str]) -> float:
    """Return the best F1 of the replies against the gold, over stemmed token multisets."""
    expected = _stems(gold)
    return max(_f1(_stems(reply), expected) for reply in replies)


def _f1(reply: Counter[str], gold: Counter[str]) -> float:
    common = (reply & gold).total()
    return 2 * common / (reply.total() + gold.total()) if common else 0.0


def _set_f1(reply: str, gold: str) -> float:
    sides = [set(text.lower().translate(_DOTS_TO_SPACES).split()) for text in (reply, gold)]
    return _f1(Counter(sides[0]), Counter(sides[1]))


def _stems(text: str) -> Counter[str]:
    # Punctuation goes before articles, as in the official code: "a-the" becomes the word "athe".
    bare = _ARTICLES.sub(" ", text.lower().translate(_DROP_PUNCTUATION))
    return Counter(_stem(word) for word in bare.split())


@lru_cache(maxsize=65536)
def _stem(word: str) -> str:
    return str(_stemmer().stem(word))


# NLTK takes more than a second to import, so it loads at the first score.
@cache
def _stemmer() -> Any:
    from nltk.stem.porter import PorterStemmer

    # NLTK's default mode is the official code's; the two classic modes differ ("dying", "skies").
    return PorterStemmer(mode=PorterStemmer.NLTK_EXTENSIONS)


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge2", "rougeL"], use_stemmer=True)


def _bleu1(reply: str, gold: str) -> float:
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    # The class that `word_tokenize` uses; `TreebankWordTokenizer` cuts some quotes differently.
    split = NLTKWordTokenizer().tokenize
    smoothing = SmoothingFunction().method1
    weights = (1, 0, 0, 0)
    return float(
        sentence_bleu([split(gold)], split(reply), weights=weights, smoothing_function=smoothing)
    )
