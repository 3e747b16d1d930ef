"""Evidence windows: parts of a conversation that hold all that some of its questions need."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from amem_dspy.errors import InvalidInputError
from amem_dspy.optimize.conversation import Conversation, Question, Turn

DRAWS = 50
"""Windows drawn for each that is taken; the one with the most questions is."""
MIN_PIECE = 15
"""Turns that each session of a lead gets at least, or a talk would be cut to shreds."""


def evidence_windows(
    conversation: Conversation,
    *,
    turns: int = 60,
    count: int = 4,
    seed: int = 0,
    categories: Sequence[int] = (1, 2, 3, 4),
) -> list[Conversation]:
    """Cut a conversation into windows for a study.

    A window holds the sessions with the evidence of a question that leads it, seeded distractor
    sessions as long as they fit whole, and every question whose evidence lies inside. The
    categories lead in turn, so that questions over several sessions get windows too. Sessions that
    are together longer than a window are cut around the evidence, to about `MIN_PIECE` turns each
    or more. Windows share no session as long as there are enough of them, and a question belongs
    to one window only.

    Args:
        conversation: The whole.
        turns: Most turns of a window.
        count: Most windows; there are fewer where no further question fits.
        seed: Same seed, same windows.
        categories: Of the questions; those without resolved evidence are left out.

    Raises:
        InvalidInputError: `turns` or `count` is below 1, or no category is given.
    """
    if turns < 1 or count < 1 or not categories:
        raise InvalidInputError(
            f"windows need at least one turn, one window and one category; got turns={turns}, "
            f"count={count}, categories={tuple(categories)}"
        )
    cutter = _Cutter(conversation, turns, random.Random(f"{seed} {conversation.id}"), categories)
    found: list[Conversation] = []
    for place in range(count):
        made = cutter.next(categories[place % len(categories)])
        if made is None:
            break
        found.append(made)
    return found


def window_key(part: Conversation) -> str:
    """Return what names a window, whatever its questions: `conv-26/D1:1-18,D7:3-20`."""
    runs = [f"{run[0].id}-{run[-1].id.rsplit(':', 1)[-1]}" for run in part.runs()]
    return f"{part.id}/{','.join(runs)}"


@dataclass(frozen=True)
class _Piece:
    """The turns `first` to `last` of a session, by place in it."""

    session: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1


class _Cutter:
    """Cuts one window after the other, and knows what the earlier ones hold."""

    def __init__(
        self,
        conversation: Conversation,
        turns: int,
        rng: random.Random,
        categories: Sequence[int],
    ) -> None:
        self.conversation = conversation
        self.turns = turns
        self.rng = rng
        self.sessions: dict[int, list[Turn]] = defaultdict(list)
        for turn in conversation.turns:
            self.sessions[turn.session].append(turn)
        self.places = {
            turn.id: (session, place)
            for session, said in self.sessions.items()
            for place, turn in enumerate(said)
        }
        asked = (q for q in conversation.questions if q.category in categories and q.evidence)
        self.questions = list(asked)
        self.used: set[int] = set()

    def next(self, category: int) -> Conversation | None:
        """Return the richest window drawn for a lead of this category, or of another; or None."""
        able = [question for question in self.questions if self._can_lead(question)]
        if not able:
            return None
        leads = self.rng.sample(able, len(able))
        ranks = [(self._overlap(lead), lead.category != category) for lead in leads]
        best = min(ranks)
        equal = [lead for lead, rank in zip(leads, ranks, strict=True) if rank == best]
        drawn = [self._window(lead) for lead in equal[:DRAWS]]
        made = max(drawn, key=lambda part: len(part.questions))
        self.used |= {turn.session for turn in made.turns}
        taken = {question.id for question in made.questions}
        self.questions = [question for question in self.questions if question.id not in taken]
        return made

    def _overlap(self, question: Question) -> int:
        return len({self.places[key][0] for key in question.evidence} & self.used)

    def _can_lead(self, question: Question) -> bool:
        pieces = self._spans(question)
        enough = len(pieces) == 1 or len(pieces) * MIN_PIECE <= self.turns
        return enough and sum(piece.size for piece in pieces) <= self.turns

    def _window(self, lead: Question) -> Conversation:
        pieces = self._grown(self._spans(lead))
        room = self.turns - sum(piece.size for piece in pieces)
        taken = self.used | {piece.session for piece in pieces}
        free = [session for session in self.sessions if session not in taken]
        for session in self.rng.sample(free, len(free)):
            if len(self.sessions[session]) <= room:
                room -= len(self.sessions[session])
                pieces.append(_Piece(session, 0, len(self.sessions[session]) - 1))
        inside = {
            turn.id
            for piece in pieces
            for turn in self.sessions[piece.session][piece.first : piece.last + 1]
        }
        return replace(
            self.conversation,
            turns=tuple(turn for turn in self.conversation.turns if turn.id in inside),
            questions=tuple(q for q in self.questions if inside.issuperset(q.evidence)),
        )

    def _spans(self, question: Question) -> list[_Piece]:
        """Return the shortest pieces that hold the evidence."""
        found: dict[int, list[int]] = defaultdict(list)
        for key in question.evidence:
            session, place = self.places[key]
            found[session].append(place)
        return [_Piece(session, min(at), max(at)) for session, at in sorted(found.items())]

    def _grown(self, pieces: list[_Piece]) -> list[_Piece]:
        """Return the pieces grown evenly to both sides, up to whole sessions or a full window."""
        room = self.turns - sum(piece.size for piece in pieces)
        growing = True
        while room and growing:
            growing = False
            for place, piece in enumerate(pieces):
                for wider in self._wider(piece):
                    step = wider.size - pieces[place].size
                    if room and step > 0:
                        pieces[place] = wider
                        room -= step
                        growing = True
        return pieces

    def _wider(self, piece: _Piece) -> tuple[_Piece, _Piece]:
        """Return the piece with one turn more before it, and that with one more behind it too."""
        before = replace(piece, first=max(0, piece.first - 1))
        end = len(self.sessions[piece.session]) - 1
        return before, replace(before, last=min(end, piece.last + 1))
