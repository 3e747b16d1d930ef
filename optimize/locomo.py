"""LoCoMo files: loading, splits, the bundled conversations.

Layout of `locomo10.json` (Maharana et al., ACL 2024); its text is CC BY-NC 4.0 and never shipped.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import re
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from amem_dspy.errors import DataError
from amem_dspy.optimize.conversation import (
    CATEGORY_NAMES,
    Conversation,
    LoadReport,
    Oddity,
    OddityKind,
    Question,
    Turn,
    window,
)
from amem_dspy.optimize.locomo_layout import (
    RawConversation,
    RawQuestion,
    RawTurn,
    checked,
    session_date,
)
from amem_dspy.signatures.text import clean_text

__all__ = [
    "CATEGORY_NAMES",
    "SPLITS",
    "Conversation",
    "LoadReport",
    "Oddity",
    "OddityKind",
    "Question",
    "Turn",
    "bundled_conversations",
    "data_hash",
    "load_locomo",
    "window",
]

SPLITS: Final[dict[str, tuple[str, ...]]] = {
    "train": ("conv-26", "conv-30", "conv-41"),
    "dev": ("conv-42", "conv-43"),
    "test": ("conv-44", "conv-47", "conv-49"),
}
_SESSION = re.compile(r"session_(\d+)")
_DATE_KEY = re.compile(r"(session_\d+)_date_time")
_WELL_FORMED = re.compile(r"D\d+:\d+")
_EVIDENCE = re.compile(r"D:?(\d+):(\d+)", re.IGNORECASE)
_CONVERSATION = TypeAdapter(RawConversation)
_TURNS = TypeAdapter(list[RawTurn])


def load_locomo(path: str | Path) -> list[Conversation]:
    """Load a file in the layout of `locomo10.json`, losing no turn and no question.

    Args:
        path: A JSON file with a list of conversations, or with one.

    Raises:
        DataError: The file cannot be read or has another layout; names the first wrong place.
    """
    return _parse(_read(path), str(path))


def bundled_conversations() -> list[Conversation]:
    """Load the conversations that come with the package, self-made and free to ship."""
    file = importlib.resources.files("amem_dspy.optimize") / "data" / "conversations.json"
    return _parse(file.read_bytes(), "the bundled conversations.json")


def data_hash(path: str | Path) -> str:
    """Return the SHA-256 of the file's bytes, 64 hex digits."""
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror})") from exc


def _parse(content: bytes, source: str) -> list[Conversation]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{source}: not JSON ({exc})") from exc
    items = [data] if isinstance(data, dict) else data
    if not isinstance(items, list) or not items:
        raise DataError(f"{source}: expected a list of conversations as in locomo10.json")
    loaded = [_Loader(source, item, n).conversation() for n, item in enumerate(items)]
    _refuse_repeats([conversation.id for conversation in loaded], f"{source}: sample_id")
    return loaded


def _refuse_repeats(ids: list[str], what: str) -> None:
    if repeated := [item for item, times in Counter(ids).items() if times > 1]:
        raise DataError(f"{what} {repeated[0]!r} is there twice; ids must be unique")


class _Loader:
    """Loads one conversation and notes what is odd on the way."""

    def __init__(self, source: str, item: object, index: int) -> None:
        self.raw = checked(_CONVERSATION, item, f"{source}: conversation[{index}]")
        self.place = f"{source}: {self.raw.sample_id}"
        self.oddities: list[Oddity] = []
        self.turns = tuple(self._turns(self.raw.conversation.model_extra or {}))
        self.turn_ids = {_plain_id(turn.id): turn.id for turn in self.turns}
        self.first_asked: dict[str, str] = {}

    def conversation(self) -> Conversation:
        body = self.raw.conversation
        questions = tuple(self._question(n, raw) for n, raw in enumerate(self.raw.qa))
        report = LoadReport(
            session_order=tuple(dict.fromkeys(turn.session for turn in self.turns)),
            turns=len(self.turns),
            categories=tuple(question.category for question in questions),
            oddities=tuple(self.oddities),
        )
        speakers = (body.speaker_a, body.speaker_b)
        return Conversation(self.raw.sample_id, speakers, self.turns, questions, report)

    def _note(self, kind: OddityKind, where: str, detail: str = "") -> None:
        self.oddities.append(Oddity(kind, f"{self.raw.sample_id}/{where}", detail))

    def _turns(self, body: dict[str, Any]) -> list[Turn]:
        keys = {
            key: int(m[1]) for key in body if (m := _SESSION.fullmatch(key)) and body[key] != []
        }
        for key in body:
            if (m := _DATE_KEY.fullmatch(key)) and m[1] not in keys:
                self._note("date_keys_without_session", key)
            elif not m and not _SESSION.fullmatch(key):
                self._note("keys_not_read", key)
        turns: list[Turn] = []
        for key, number in sorted(keys.items(), key=lambda item: item[1]):
            date = session_date(body.get(f"{key}_date_time"), f"{self.place} {key}_date_time")
            raw_turns = checked(_TURNS, body[key], f"{self.place} {key}")
            turns += [self._turn(raw, number, date) for raw in raw_turns]
        if not turns:
            raise DataError(f"{self.place}: no session with turns")
        _refuse_repeats([turn.id for turn in turns], f"{self.place}: dia_id")
        return turns

    def _turn(self, raw: RawTurn, session: int, date: datetime) -> Turn:
        if raw.blip_caption and not raw.img_url:
            self._note("captions_without_image_link", raw.dia_id)
        caption = raw.blip_caption or raw.query
        image = f" [image: {caption}]" if caption else ""
        text = clean_text(raw.text + image).strip()
        if not text:
            raise DataError(f"{self.place} {raw.dia_id}: a turn without text or image caption")
        return Turn(raw.dia_id, session, clean_text(raw.speaker), date, text)

    def _question(self, index: int, raw: RawQuestion) -> Question:
        where = f"q{index}"
        if raw.answer is None and raw.category != 5:
            raise DataError(f"{self.place} qa[{index}]: no answer in category {raw.category}")
        self._note_oddities(where, raw)
        return Question(
            id=f"{self.raw.sample_id}/{where}",
            question=clean_text(raw.question),
            answer=_clean(raw.answer),
            category=raw.category,
            evidence=self._evidence(where, raw.evidence),
            adversarial_answer=_clean(raw.adversarial_answer),
        )

    def _note_oddities(self, where: str, raw: RawQuestion) -> None:
        answer = raw.answer
        if isinstance(answer, int):
            self._note("integer_answers", where, str(answer))
        if raw.category == 5 and answer is None:
            self._note("category_5_without_answer", where)
        if raw.category == 5 and answer is not None and raw.adversarial_answer is not None:
            self._note("category_5_with_both_keys", where)
        if raw.category == 3 and ";" in str(answer):
            self._note("category_3_golds_with_semicolon", where)
        if not raw.evidence:
            self._note("questions_without_evidence", where)
        first = self.first_asked.setdefault(raw.question, where)
        if first != where:
            self._note("duplicate_questions", where, f"as {first}")

    def _evidence(self, where: str, raw: list[str]) -> tuple[str, ...]:
        """Return the turns that the strings name, in order, each once."""
        found: dict[str, None] = {}
        for text in raw:
            named = [f"D{int(a)}:{int(b)}" for a, b in _EVIDENCE.findall(text)]
            known = [self.turn_ids[name] for name in named if name in self.turn_ids]
            found.update(dict.fromkeys(known))
            reading = f"{text!r} read as {', '.join(known) or 'nothing'}"
            if not _WELL_FORMED.fullmatch(text):
                self._note("evidence_strings_malformed", where, reading)
                for name in named:
                    if name not in self.turn_ids:
                        self._note("evidence_ids_absent", where, f"{name!r}")
            elif text not in self.turn_ids.values():
                self._note("evidence_ids_absent", where, reading)
        return tuple(found)


def _clean(answer: str | int | None) -> str | None:
    return None if answer is None else clean_text(str(answer))


def _plain_id(turn_id: str) -> str:
    """Return a turn id without zero padding, so that `D30:05` and `D30:5` meet."""
    return _EVIDENCE.sub(lambda m: f"D{int(m[1])}:{int(m[2])}", turn_id)
