"""Notes, their links and their history, as users read them.

A note is m_i = {c_i, t_i, K_i, G_i, X_i, e_i, L_i} (A-MEM, arXiv 2502.12110, eq. 1); the embedding
e_i stays in the store.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

MetadataValue = str | int | float | bool | None
# Pydantic's own JSON form rounds an offset with seconds (local mean time) to minutes.
Moment = Annotated[
    datetime,
    BeforeValidator(lambda given: _moment(given)),
    PlainSerializer(datetime.isoformat, when_used="json"),
]
Step = Literal["construct_note", "decide_links", "update_neighbours"]


class Link(BaseModel):
    """A link to another note of the same user; the other note holds its mirror image.

    Attributes:
        id: The note linked to.
        reason: Why, in the model's words.
        strength: In [0, 1]; past the cap of links the strongest stay.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    reason: str = ""
    strength: float = Field(default=0.5, ge=0, le=1)


class Revision(BaseModel):
    """The values of a note before one change, so that the change can be undone.

    Attributes:
        revision: The note's revision before the change.
        at: When the change was made (UTC).
        cause: What made it: the evolution by a new note, the user (update), an undo, a repair, the
            deletion of a linked note, an undo or import at the other end of a link (relink), or the
            restoring of a snapshot.
        by: The note whose arrival caused it, if one did.
        content: The content before; None where the change left the content alone.
        pending_steps: The steps that waited for `repair()` before.
    """

    model_config = ConfigDict(frozen=True)

    revision: int
    at: datetime
    cause: Literal["evolution", "update", "undo", "repair", "delete", "relink", "restore"]
    by: str | None = None
    content: str | None = None
    context: str = ""
    keywords: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    pending_steps: tuple[Step, ...] = ()


class Note(BaseModel):
    """One note of one user.

    Attributes:
        timestamp: Timezone-aware; when the content was said, not when it was stored.
        thread: The conversation it belongs to, if any.
        position: Its place in the thread, from 0, in order of arrival.
        pending_steps: Steps of the write path that still wait for `repair()`.
        revision: Counts the changes of this note, from 0.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    user: str
    content: str
    timestamp: Moment
    keywords: tuple[str, ...] = ()
    context: str = ""
    tags: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    history: tuple[Revision, ...] = ()
    source: str | None = None
    thread: str | None = None
    position: int | None = None
    metadata: dict[str, MetadataValue] = Field(default_factory=dict)
    pending_steps: tuple[Step, ...] = ()
    revision: int = 0

    @property
    def pending(self) -> bool:
        """True while a step of the write path waits for `repair()`."""
        return bool(self.pending_steps)

    def document(self) -> str:
        """Return the text that is embedded and searched: c + K + G + X (eq. 3)."""
        return represent(self.content, self.keywords, self.tags, self.context)


def _moment(given: Any) -> Any:
    return datetime.fromisoformat(given) if isinstance(given, str) else given


def derived_id(user: str, note_id: str) -> str:
    """Return the id that a user's note gets where another user holds its own; always the same."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"amem-import:{user!r}:{note_id}"))


def represent(content: str, keywords: Iterable[str], tags: Iterable[str], context: str) -> str:
    """Return the one text form of a note, stored or new, for embedding and full-text search."""
    parts = [content, " ".join(keywords), " ".join(tags), context]
    return "\n".join(part for part in parts if part)


class Hit(BaseModel):
    """A note that a search returned.

    Attributes:
        score: Higher is better; the scale is the mode's, as `AgenticMemory.search` states it.
        via: "search", "thread", or the id of the note whose link led here.
    """

    model_config = ConfigDict(frozen=True)

    note: Note
    score: float
    via: str = "search"
