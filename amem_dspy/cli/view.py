"""Notes, hits and histories as data for JSON and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from amem_dspy.cli.output import Output, entry, row
from amem_dspy.cli.session import short_id

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from amem_dspy.memory import AgenticMemory
    from amem_dspy.note import Hit, Note, Revision

CARD = ("context", "keywords", "tags")


def note_data(note: Note) -> dict[str, Any]:
    """Return a note as plain values."""
    return {**note.model_dump(mode="json"), "pending": note.pending}


def hit_data(hit: Hit) -> dict[str, Any]:
    """Return a hit as plain values."""
    return {"score": hit.score, "via": hit.via, "note": note_data(hit.note)}


def note_row(note: Note, output: Output) -> Text:
    """Return a note as one line: id, date, content."""
    cells = [(short_id(note.id, output), "cyan"), (note.timestamp.date().isoformat(), "dim")]
    pending = [("[pending]", "yellow")] if note.pending else []
    return row(*cells, *pending, (note.content, ""))


def hit_row(hit: Hit, output: Output) -> Text:
    """Return a hit as one line: id, score, date, how it was found, content."""
    direct = hit.via in ("search", "thread")
    via = hit.via if direct else f"link from {short_id(hit.via, output)}"
    return row(
        (short_id(hit.note.id, output), "cyan"),
        (f"{hit.score:.3f}", "green"),
        (hit.note.timestamp.date().isoformat(), "dim"),
        (f"[{via}]", "dim"),
        (hit.note.content, ""),
    )


def card_lines(note: Note, output: Output, others: dict[str, Note]) -> Iterator[RenderableType]:
    """Yield a note in full: content, card, links with their reasons.

    Args:
        note: The note.
        output: Where it is shown.
        others: The notes that it links to, by id.
    """
    yield row((note.id, "cyan"), (note.timestamp.isoformat(), "dim"))
    yield entry("content", note.content)
    yield from (entry(name, _value(getattr(note, name))) for name in CARD if getattr(note, name))
    for name in ("source", "thread"):
        if value := getattr(note, name):
            yield entry(name, value)
    for key, value in note.metadata.items():
        yield entry(f"metadata {row((key, '')).plain}", str(value))
    if note.pending:
        yield entry("pending", ", ".join(note.pending_steps))
    yield from link_lines(note, output, others)


def link_lines(note: Note, output: Output, others: dict[str, Note]) -> Iterator[Text]:
    """Yield a line for each link: the other note's id, strength, content and the reason."""
    for link in note.links:
        content = others[link.id].content if link.id in others else "(gone)"
        yield row(
            ("  link", "bold"),
            (short_id(link.id, output), "cyan"),
            (f"{link.strength:.2f}", "green"),
            (content[:60], ""),
            (f"because: {link.reason}" if link.reason else "(no reason given)", "italic"),
        )


def linked(memory: AgenticMemory, note: Note) -> dict[str, Note]:
    """Return the notes that a note links to, by id."""
    return memory.store.get(memory.user, [link.id for link in note.links])


def changes(note: Note) -> list[dict[str, Any]]:
    """Return a note's history, oldest first: of each change the fields before and after it."""
    made = []
    for place, revision in enumerate(note.history):
        fields = _changed_fields(note, place)
        head = revision.model_dump(mode="json", include={"revision", "at", "cause", "by"})
        made.append({**head, "changes": fields})
    return made


def evolved(note: Note, by: str) -> Revision | None:
    """Return the state before the arrival of note `by` rewrote the note's card, if it did."""
    for place, revision in enumerate(note.history):
        if revision.by == by and revision.cause == "evolution":
            return revision if set(_changed_fields(note, place)) & set(CARD) else None
    return None


def change_lines(history: Sequence[dict[str, Any]], output: Output) -> Iterator[Text]:
    """Yield the lines of a history."""
    for change in history:
        by = f"by {short_id(change['by'], output)}" if change["by"] else ""
        yield row(
            (f"revision {change['revision']}", "bold"),
            (change["at"][:19], "dim"),
            (" ".join([change["cause"], by]).strip(), "yellow"),
        )
        for name, (before, after) in change["changes"].items():
            yield entry(f"  {name} before", _value(before))
            yield entry(f"  {name} after", _value(after))


def _changed_fields(note: Note, place: int) -> dict[str, tuple[Any, Any]]:
    before = note.history[place]
    later: list[Note | Revision] = [*note.history[place + 1 :], note]
    pairs = {name: (getattr(before, name), getattr(later[0], name)) for name in CARD}
    pairs["links"] = (_link_ids(before), _link_ids(later[0]))
    if before.content is not None:
        # A revision holds the content only where its change touched it.
        after = next(state.content for state in later if state.content is not None)
        pairs["content"] = (before.content, after)
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _link_ids(state: Note | Revision) -> list[str]:
    return [link.id for link in state.links]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(value) or "(none)"
