"""Conversations with questions: turns, questions, the report of their loading, and windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, pairwise
from typing import Final, Literal, get_args

from amem_dspy.errors import InvalidInputError

# The numbers follow the official evaluation code; the order in the paper's text is another one.
CATEGORY_NAMES: Final[dict[int, str]] = {
    1: "multi-hop",
    2: "temporal",
    3: "open-domain",
    4: "single-hop",
    5: "adversarial",
}
OddityKind = Literal[
    "integer_answers",
    "category_5_without_answer",
    "category_5_with_both_keys",
    "evidence_strings_malformed",
    "evidence_ids_absent",
    "questions_without_evidence",
    "duplicate_questions",
    "date_keys_without_session",
    "keys_not_read",
    "captions_without_image_link",
    "category_3_golds_with_semicolon",
]


@dataclass(frozen=True)
class Turn:
    """One utterance; `text` ends with `[image: ...]` where a picture was sent.

    `timestamp` is the date of the turn's session, shared by all its turns (UTC).
    """

    id: str
    session: int
    speaker: str
    timestamp: datetime
    text: str


@dataclass(frozen=True)
class Question:
    """One question; `id` is `conversation/q<index in the file>`.

    `evidence` holds ids of turns that exist. `adversarial_answer` is the bait of category 5 and
    never a gold answer: there a refusal is right, and `answer` is not used.
    """

    id: str
    question: str
    answer: str | None
    category: int
    evidence: tuple[str, ...] = ()
    adversarial_answer: str | None = None


@dataclass(frozen=True)
class Oddity:
    """One irregular place of a file, without its text, so that results may show it.

    `where` is `conversation/q3`, `conversation/D1:4` or `conversation/key`.
    """

    kind: OddityKind
    where: str
    detail: str = ""


@dataclass(frozen=True)
class LoadReport:
    """What a file holds and what is odd about it; `categories` has one entry per question."""

    session_order: tuple[int, ...] = ()
    turns: int = 0
    categories: tuple[int, ...] = ()
    oddities: tuple[Oddity, ...] = ()

    @classmethod
    def total(cls, reports: Iterable[LoadReport]) -> LoadReport:
        """Return the report of several conversations as one."""
        parts = list(reports)
        return cls(
            tuple(number for part in parts for number in part.session_order),
            sum(part.turns for part in parts),
            tuple(category for part in parts for category in part.categories),
            tuple(oddity for part in parts for oddity in part.oddities),
        )

    @property
    def by_category(self) -> dict[int, int]:
        """Number of questions of each category, 1 to 5."""
        return {category: self.categories.count(category) for category in CATEGORY_NAMES}

    @property
    def counts(self) -> dict[str, int]:
        """Sessions, turns, questions and every kind of oddity, zeros included."""
        found = Counter(oddity.kind for oddity in self.oddities)
        sizes = {"sessions": len(self.session_order), "turns": self.turns}
        kinds = {kind: found[kind] for kind in get_args(OddityKind)}
        return {**sizes, "questions": len(self.categories), **kinds}

    def lines(self, limit: int | None = 5) -> Iterator[str]:
        """Yield the report for a person, at most `limit` places per kind (None: all)."""
        counts = self.counts
        yield f"{counts['sessions']} sessions, {self.turns} turns, {counts['questions']} questions"
        for category, number in self.by_category.items():
            yield f"category {category} ({CATEGORY_NAMES[category]}): {number}"
        for kind in get_args(OddityKind):
            places = [oddity for oddity in self.oddities if oddity.kind == kind]
            if places:
                yield f"{kind.replace('_', ' ')}: {len(places)}"
            yield from (f"  {o.where} {o.detail}".rstrip() for o in places[:limit])
            if limit is not None and len(places) > limit:
                yield f"  and {len(places) - limit} more"

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True)
class Conversation:
    """A conversation or a window of one; a window keeps the `id` and `report` of the whole."""

    id: str
    speakers: tuple[str, str]
    turns: tuple[Turn, ...]
    questions: tuple[Question, ...]
    report: LoadReport = LoadReport()

    def __repr__(self) -> str:
        # DSPy logs examples whole; a conversation is thousands of words.
        return f"Conversation({self.id} {self.span}, {len(self.questions)} questions)"

    @property
    def span(self) -> str:
        """First and last turn id of each stretch, as `D1:1..D3:12` or `D1:1..D2:9+D7:3..D7:20`."""
        order = sorted(self.report.session_order) or range(len(self.turns) + 1)
        after = dict(pairwise(order))
        stretches: list[tuple[Turn, Turn]] = []
        for run in self.runs():
            follows = stretches and after.get(stretches[-1][1].session) == run[0].session
            if follows and run[0].id.endswith((":1", ":01")):
                stretches[-1] = (stretches[-1][0], run[-1])
            else:
                stretches.append((run[0], run[-1]))
        return "+".join(f"{first.id}..{last.id}" for first, last in stretches)

    def runs(self) -> list[list[Turn]]:
        """Return the turns by session."""
        return [list(said) for _, said in groupby(self.turns, key=lambda turn: turn.session)]


def window(conversation: Conversation, *, max_turns: int, start_session: int = 1) -> Conversation:
    """Return the first `max_turns` turns from a session on, with what they can answer.

    Kept are the questions that have resolved evidence, all of it inside. The cut may fall inside
    a session.
    """
    turns = tuple(turn for turn in conversation.turns if turn.session >= start_session)[:max_turns]
    if max_turns < 1 or not turns:
        raise InvalidInputError(
            f"no window of {max_turns} turns from session {start_session} on in {conversation.id}; "
            f"its sessions are {sorted({turn.session for turn in conversation.turns})}"
        )
    inside = {turn.id for turn in turns}
    asked = (q for q in conversation.questions if q.evidence and inside.issuperset(q.evidence))
    return replace(conversation, turns=turns, questions=tuple(asked))
