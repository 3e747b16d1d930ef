"""What a step had to do with a wrong answer, for optimisers that reflect.

LoCoMo names the evidence of a question. Evidence that was not shown is the fault of the query, or
of what the notes say; evidence that was shown is the answerer's. The words that would have made
the difference are named: of the evidence that the query lacks, of the question that the note
lacks, of a card that an update dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import dspy

from amem_dspy.note import Note, Revision
from amem_dspy.optimize.build import Build, MemoryBuilds, sources
from amem_dspy.optimize.conversation import Turn
from amem_dspy.optimize.score import REFUSAL
from amem_dspy.optimize.tuning import is_refusal
from amem_dspy.program import MemoryProgram

_WORD = re.compile(r"\w+")
_LEAST_CHARS = 3
_MOST_WORDS = 12
_MOST_CHARS = 240
_LONG_ANSWER = 3
# Too common to tell one note from another.
_COMMON = frozenset(
    _WORD.findall(
        "the and for are was were has have had his her its their they them you your she him who "
        "what when where which why how does did not with from that this these those about into "
        "than then there would could should can will been being any some many much"
    )
)


@dataclass
class Written:
    """The memory that a question was answered from, opened only when something is asked of it."""

    builds: MemoryBuilds
    build: Build
    k: int
    token_budget: int | None

    @cached_property
    def notes(self) -> dict[str, Note]:
        """The notes by turn id."""
        with self.builds.open(MemoryProgram(), self.build) as memory:
            return {sources([note])[0]: note for note in memory.all() if note.source}

    def found(self, query: str) -> list[str]:
        """Return the turn ids that the query finds where no token budget cuts."""
        with self.builds.open(MemoryProgram(), self.build) as memory:
            return sources([hit.note for hit in memory.search(query, k=self.k)])


def step_feedback(
    example: dspy.Example, prediction: dspy.Prediction, step: str, score: float
) -> str:
    """Return what a step had to do with an answer.

    Args:
        example: The question, with its gold answer and evidence.
        prediction: What `ConversationQA` returned.
        step: The predictor's name in the memory program.
        score: The tuning score of the answer.
    """
    case = _Case(example, prediction, step)
    told = f"{case.said()} Score {score:.2f} of 1."
    if score >= 1:
        return told
    if prediction.get("failed"):
        fault = "no reply validated" if step == "answer_question" else "no fault of this step"
        return f"{told} The answerer gave no usable reply: {fault}."
    if not example.evidence:
        return told
    lines = case.on_answer() if step == "answer_question" else case.on_step()
    return "\n".join([told, *lines])


class _Case:
    """One wrong answer, as one step sees it."""

    def __init__(self, example: dspy.Example, prediction: dspy.Prediction, step: str) -> None:
        self.example = example
        self.prediction = prediction
        self.step = step
        self.right = REFUSAL if example.category == 5 else str(example.answer)
        self.written: Written | None = prediction.__dict__.get("_written")
        self.missed = [key for key in example.evidence if key not in prediction.retrieved]

    def said(self) -> str:
        return (
            f"Question: {self.example.question} Answer given: {self.prediction.answer} "
            f"Right: {self.right}."
        )

    def on_answer(self) -> list[str]:
        if self.missed:
            shown = "Notes with the evidence were not shown: not the fault of the answer alone."
            return [shown, *self._cut()]
        lines = ["The notes with the evidence were all shown: this answer is wrong."]
        if is_refusal(self.prediction.answer) and self.example.category != 5:
            lines.append("It refuses, though the notes have the answer.")
        elif len(self.prediction.answer.split()) > _LONG_ANSWER * max(3, len(self.right.split())):
            lines.append("It is much longer than the right one: the fact alone is wanted.")
        return [*lines, *(f"The evidence: {_quoted(turn)}" for turn in self._turns())]

    def on_step(self) -> list[str]:
        lines = self._dropped() if self.step == "update_neighbours" else []
        if not self.missed:
            told = "The notes with the evidence were all shown: "
            rest = "the answer is at fault, not this step."
            return lines or [told + rest]
        turns = [f"Not found, though it holds the evidence: {_quoted(t)}" for t in self._turns()]
        if self.step == "rewrite_query":
            return [*turns, *self._query(), *self._cut()]
        return [*lines, *turns, *self._cut(), *self._cards()]

    def _turns(self) -> list[Turn]:
        wanted = self.missed or self.example.evidence
        return [turn for turn in self.example.conversation.turns if turn.id in wanted]

    def _cut(self) -> list[str]:
        """Tell what a token budget left out."""
        written = self.written
        if written is None or written.token_budget is None or not self.missed:
            return []
        found = written.found(self.prediction.query)
        cut = [key for key in self.missed if key in found]
        if not cut:
            return []
        return [
            f"The budget of {written.token_budget} tokens left out {len(cut)} of them that the "
            "query did find: they must rank higher."
        ]

    def _query(self) -> list[str]:
        query = self.prediction.get("query", "")
        said = _words([f"{turn.speaker} {turn.text}" for turn in self._turns()])
        lacking = _some(said - _words([query]))
        return [f"The query was: {query}. It lacks these words of the evidence: {lacking}."]

    def _notes(self, keys: Iterable[str]) -> list[Note]:
        notes = self.written.notes if self.written else {}
        return [notes[key] for key in keys if key in notes]

    def _cards(self) -> list[str]:
        """Tell what the notes of the missed evidence say, and do not."""
        return [line for note in self._notes(self.missed) for line in self._card(note)]

    def _card(self, note: Note) -> list[str]:
        if note.pending:
            steps = ", ".join(note.pending_steps)
            return [f"Its note is not finished: no reply validated in {steps}."]
        if self.step == "decide_links":
            return [self._links(note)]
        lacking = _words([self.example.question]) - _words([note.document()])
        card = f"Its note has the keywords {', '.join(note.keywords) or '(none)'}"
        lines = [
            f"{card}, the tags {', '.join(note.tags) or '(none)'} and the context "
            f"'{_clipped(note.context)}'. It lacks these words of the question: {_some(lacking)}."
        ]
        return [*lines, *self._limits(note)]

    def _limits(self, note: Note) -> list[str]:
        """Tell where a limit of the policy was reached."""
        policy = self.written.builds.policy if self.written else None
        if policy is None:
            return []
        lines = []
        if len(note.content) > policy.max_prompt_chars:
            lines.append(f"Only its first {policy.max_prompt_chars} characters were shown.")
        if len(note.keywords) >= policy.max_keywords:
            lines.append(f"Its keywords are at the limit of {policy.max_keywords}.")
        if len(note.context) >= policy.max_context_chars:
            lines.append(f"Its context is at the limit of {policy.max_context_chars} characters.")
        return lines

    def _links(self, note: Note) -> str:
        shown = {one.id for one in self._notes(self.prediction.retrieved)}
        linked = [link for link in note.links if link.id in shown]
        if linked:
            return f"It is linked to a note that was shown, with strength {linked[0].strength:.1f}."
        return "It is linked to none of the notes that were shown: a link would have led to it."

    def _dropped(self) -> list[str]:
        """Tell which words that the question needed an update took from a card."""
        needed = _words([self.right, self.example.question])
        lines = []
        for note in self._notes(self.example.evidence):
            lost = (_before(note) & needed) - _words([note.document()])
            if lost:
                content = _clipped(note.content)
                lines.append(
                    f"Updates of the note '{content}' dropped words that this question needed: "
                    f"{_some(lost)}."
                )
        return lines


def _before(note: Note) -> set[str]:
    """Return the words of the card before updates by later notes."""
    earlier = [entry for entry in note.history if entry.cause == "evolution"]
    return _words([_card_text(entry) for entry in earlier])


def _card_text(entry: Revision) -> str:
    return " ".join([*entry.keywords, *entry.tags, entry.context])


def _words(texts: Iterable[str]) -> set[str]:
    found = {word for text in texts for word in _WORD.findall(text.casefold())}
    return {word for word in found if len(word) >= _LEAST_CHARS and word not in _COMMON}


def _some(words: set[str]) -> str:
    shown = ", ".join(sorted(words)[:_MOST_WORDS]) or "none"
    return shown if len(words) <= _MOST_WORDS else f"{shown} and {len(words) - _MOST_WORDS} more"


def _quoted(turn: Turn) -> str:
    return f"{turn.speaker}: {_clipped(turn.text)}"


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."
