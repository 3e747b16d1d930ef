"""AgenticMemory: a program, a store, an embedder and a policy, as users import it."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from os import PathLike, fspath
from typing import Any, cast

import dspy

from amem_dspy.embedder import Embedder, resolve_embedder
from amem_dspy.errors import (
    ConfigError,
    ConflictError,
    InvalidInputError,
    NoteNotFoundError,
    SourceConflictError,
)
from amem_dspy.evolve import Workspace, last_change, recorded, reverted
from amem_dspy.ingest import MAX_CONFLICTS, Call, Draft, Ingest, Outcome, Path, commit
from amem_dspy.inputs import (
    Item,
    Messages,
    as_item,
    asked_text,
    aware_time,
    bound,
    content_text,
    flat_metadata,
    is_blank,
    name,
    tag_names,
    whole_number,
)
from amem_dspy.location import local_folder
from amem_dspy.models import resolve_lm
from amem_dspy.note import Hit, MetadataValue, Note, Revision, Step
from amem_dspy.offload import offload
from amem_dspy.origin import check_origin
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.program import MemoryProgram, resolve_program
from amem_dspy.render import answer_context
from amem_dspy.retrieve import Mode, Query, Retriever
from amem_dspy.runner import StepListener, StepRunner
from amem_dspy.store import NoteFilter, NoteStore
from amem_dspy.upkeep import Upkeep
from amem_dspy.usage import Meter, StepUsage

_log = logging.getLogger(__name__)
# Of the module: a memory inside a program that is copied must hold no lock.
_opening = threading.Lock()


def _now() -> datetime:
    return datetime.now(UTC)


class AgenticMemory(Upkeep):
    """The memory of one user: notes that a language model describes, links and keeps up to date.

    Args:
        uri: LanceDB address: a folder, `s3://`, `gs://`, `az://` or `db://`.
        user: A namespace; the notes of other users are invisible and out of reach.
        program: A compiled program (path or `MemoryProgram`), or None for the untuned one.
        lm: The model; else `dspy.settings.lm`, else $AMEM_LM, else the embedded model. A request
            that is rate limited or gets no answer is made again, `lm.num_retries` times, after the
            pause that the server asks for; one of more than 60 s is an error at once.
        embedder: A sentence-transformers id or path, or an `Embedder`; else $AMEM_EMBEDDER, else
            all-MiniLM-L6-v2.
        policy: Steps and budgets of the write path.
        storage_options: Passed to LanceDB for object storage.
        clock: Returns the current time, UTC.
        meter: Counts calls and tokens; give several memories one to count them together.
        on_step: Called with note id, step, inputs and outputs of each call that validated.

    Construction does no I/O. Safe for threads; a context manager.
    """

    def __init__(
        self,
        uri: str | PathLike[str],
        *,
        user: str = "default",
        program: str | PathLike[str] | MemoryProgram | None = None,
        lm: dspy.BaseLM | str | None = None,
        embedder: str | Embedder | None = None,
        policy: EvolutionPolicy | None = None,
        storage_options: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = _now,
        meter: Meter | None = None,
        on_step: StepListener | None = None,
    ) -> None:
        self.user = name(user, what="user")
        self.policy = policy or EvolutionPolicy()
        self.embedder = resolve_embedder(embedder)
        if not fspath(uri).strip():
            raise ConfigError("the store's address is empty; name a folder, such as ./memory")
        # Of now: the process may move to another folder before the store is opened (again).
        self._uri = str(local_folder(fspath(uri)) or uri)
        self._lm = lm
        self._storage_options = storage_options
        self._clock = clock
        self._runner = StepRunner(
            resolve_program(program), lm=lambda: self.lm, meter=meter or Meter()
        )
        self._runner.listener = on_step
        self._opened: NoteStore | None = None

    def __enter__(self) -> AgenticMemory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the store; a later call opens it again."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def program(self) -> MemoryProgram:
        """The program whose predictors are called."""
        return self._runner.program

    @property
    def lm(self) -> dspy.BaseLM:
        """The model that the next step will call."""
        lm = resolve_lm(self._lm)
        check_origin(self.program, model=lm.model, embedder=self.embedder.id)
        return lm

    @property
    def store(self) -> NoteStore:
        """The notes on disk."""
        opened = self._opened
        if opened is None:
            with _opening:
                opened = self._opened = self._opened or NoteStore(
                    self._uri,
                    embedder_id=self.embedder.id,
                    dimension=self.embedder.dimension,
                    storage_options=self._storage_options,
                )
        return opened

    def add(
        self,
        content: str | Messages,
        *,
        timestamp: str | datetime | None = None,
        source: str | None = None,
        thread: str | None = None,
        metadata: Mapping[str, MetadataValue] | None = None,
        defer: bool = False,
        strict: bool = False,
    ) -> Note:
        """Construct, link and store one note, and update the notes it changes, in one commit.

        Costs one model call for the first note, two where nothing is updated, three otherwise.

        Args:
            content: The text, or the chat messages of one exchange.
            timestamp: ISO 8601 or datetime; None means now, without a zone UTC.
            source: Idempotency key, unique per user; the same content returns the stored note.
            thread: The conversation it belongs to; its notes are neighbours in order of arrival.
            metadata: A flat dictionary, filterable with `search(where=...)`.
            defer: Store at once and leave the model's work to `repair()`.
            strict: Raise instead of storing a pending note when no reply of the model validates.

        Raises:
            InvalidInputError: Blank content, bad timestamp, nested metadata.
            SourceConflictError: `source` holds other content.
            ExtractionError: With `strict`; nothing was stored.
            ModelError: The model could not be reached or refused; nothing was stored.
        """
        item = Item(
            content=content, timestamp=timestamp, source=source, thread=thread, metadata=metadata
        )
        return self._runner.drive(self._add([item], wave=1, defer=defer, strict=strict))[0]

    async def aadd(
        self,
        content: str | Messages,
        *,
        timestamp: str | datetime | None = None,
        source: str | None = None,
        thread: str | None = None,
        metadata: Mapping[str, MetadataValue] | None = None,
        defer: bool = False,
        strict: bool = False,
    ) -> Note:
        """Do what `add` does without blocking the event loop."""
        item = Item(
            content=content, timestamp=timestamp, source=source, thread=thread, metadata=metadata
        )
        return (await self._runner.adrive(self._add([item], wave=1, defer=defer, strict=strict)))[0]

    def add_many(
        self,
        items: Iterable[str | Item | Mapping[str, Any]],
        *,
        wave: int = 16,
        defer: bool = False,
        strict: bool = False,
        progress: Callable[[Note], None] | None = None,
    ) -> list[Note]:
        """Add notes in waves whose model calls run together; one commit per note, in input order.

        A note's candidates are the store's notes and the wave's earlier ones; updates of one
        neighbour are chained in input order. While a wave is committed, the notes of the next one
        are constructed. The result does not depend on the number of threads. `wave=1` is the
        paper's order exactly.

        Args:
            items: Texts, or mappings with content, timestamp, source, thread, metadata.
            wave: Notes per wave, at least 1.
            defer: As in `add`.
            strict: As in `add`.
            progress: Called with each stored note.
        """
        return self._runner.drive(
            self._add(items, wave=wave, defer=defer, strict=strict, progress=progress)
        )

    def _add(
        self,
        items: Iterable[str | Item | Mapping[str, Any]],
        *,
        wave: int,
        defer: bool,
        strict: bool,
        progress: Callable[[Note], None] | None = None,
    ) -> Path:
        wave = whole_number(wave, what="wave", least=1)
        if isinstance(items, str | Mapping):
            # Iterated, a text would become a note for each letter.
            raise InvalidInputError("add_many takes a list of items; for one note call add")
        # Checked before a store is made for it.
        fresh = [self._fresh(as_item(item)) for item in items]
        self.store.open()
        stored: list[Note] = []
        ahead: dict[str, Draft] = {}
        for start in range(0, len(fresh), wave):
            group = fresh[start : start + wave]
            known = self._stored_sources(group)
            drafts = self._drafts(group, known, defer=defer, strict=strict)
            drafts = {key: ahead.get(key, draft) for key, draft in drafts.items()}
            following = fresh[start + wave : start + 2 * wave] if wave > 1 and not defer else []
            ahead = self._ahead(following, group, strict=strict)
            run = yield from self._ingest().run(list(drafts.values()), list(ahead.values()))
            made = dict(zip(drafts, run, strict=True))
            for note in group:
                done = made.get(note.source or note.id) or known[note.source]
                stored.append(cast(Note, done))
                if progress:
                    progress(stored[-1])
        return stored

    def _drafts(
        self,
        group: Sequence[Note],
        known: Mapping[str | None, Note | None],
        *,
        defer: bool,
        strict: bool,
    ) -> dict[str, Draft]:
        """Return the drafts of what is not stored yet, each source once, by source or id."""
        drafts: dict[str, Draft] = {}
        for note in group:
            if note.source and known[note.source]:
                continue
            twin = drafts.get(note.source or note.id)
            if twin and twin.note.content != note.content:
                raise SourceConflictError(note.source or "", note_id=twin.note.id)
            if not twin:
                drafts[note.source or note.id] = self._draft(note, defer=defer, strict=strict)
        return drafts

    def _ahead(
        self, following: Sequence[Note], group: Sequence[Note], *, strict: bool
    ) -> dict[str, Draft]:
        """Return the drafts of the next wave, by source or id, without those stored by then."""
        if not following or not self.policy.construct:
            return {}
        held = {note.source for note in group if note.source}
        held |= self.store.find_sources(self.user, [n.source for n in following if n.source]).keys()
        drafts: dict[str, Draft] = {}
        for note in following:
            if note.source not in held:
                drafts.setdefault(note.source or note.id, self._draft(note, strict=strict))
        return drafts

    def _draft(self, note: Note, *, defer: bool = False, strict: bool = False) -> Draft:
        steps = self._steps()
        if defer:
            return Draft(note.model_copy(update={"pending_steps": steps}), steps=(), deferred=steps)
        return Draft(note, steps=steps, strict=strict)

    def _steps(self) -> tuple[Step, ...]:
        wanted: list[Step] = ["construct_note"] if self.policy.construct else []
        return (*wanted, "decide_links") if self.policy.link else tuple(wanted)

    def _fresh(self, item: Item) -> Note:
        source, thread = item.get("source"), item.get("thread")
        if source is not None:
            source = name(source, what="source")
        return Note(
            id=_note_id(self.user, source),
            user=self.user,
            content=content_text(item["content"]),
            timestamp=aware_time(item.get("timestamp"), self._clock()),
            source=source,
            thread=None if thread is None else name(thread, what="thread"),
            metadata=flat_metadata(item.get("metadata")),
        )

    def _stored_sources(self, group: Sequence[Note]) -> dict[str | None, Note | None]:
        """Return the stored note, or None, of each source in a group."""
        sources = [note.source for note in group if note.source]
        found = self.store.find_sources(self.user, sources) if sources else {}
        for note in group:
            stored = found.get(note.source or "")
            if stored is not None and stored.content != note.content:
                raise SourceConflictError(stored.source or "", note_id=stored.id)
        return {source: found.get(source) for source in sources}

    def _ingest(self) -> Ingest:
        return Ingest(self.store, self.embedder, self.policy, user=self.user, clock=self._clock)

    def get(self, note_id: str) -> Note:
        """Return a note.

        Raises:
            NoteNotFoundError: This user has no such note.
        """
        found = self.store.get(self.user, [note_id])
        if note_id not in found:
            raise NoteNotFoundError(note_id, user=self.user)
        return found[note_id]

    def all(self, *, limit: int | None = None) -> list[Note]:
        """Return the user's notes by timestamp, then by arrival."""
        return self.store.notes(self.user, limit=limit)

    def count(self) -> int:
        """Return how many notes the user has."""
        return self.store.count(self.user)

    def update(self, note_id: str, *, content: str) -> Note:
        """Give a note other content: construct, link and embed it again, and record the revision.

        Raises:
            NoteNotFoundError: This user has no such note.
            InvalidInputError: Blank content.
        """
        text = content_text(content)

        def draft() -> Draft:
            note = self.get(note_id)
            changed = note.model_copy(update={"content": text})
            return Draft(changed, steps=self._steps(), existing=note, cause="update")

        return self._redone(draft)

    def repair(self) -> list[Note]:
        """Finish the pending notes, oldest first; return them, whether finished now or not.

        One that is deleted meanwhile is left out.
        """
        repaired: list[Note] = []
        for note in self.store.notes(self.user, filter=NoteFilter(pending=True)):
            with suppress(NoteNotFoundError):
                repaired.append(self._repaired(note.id))
        return repaired

    def _repaired(self, note_id: str) -> Note:
        def draft() -> Draft:
            note = self.get(note_id)
            return Draft(note, steps=note.pending_steps, existing=note, cause="repair", fresh=True)

        return self._redone(draft)

    def _redone(self, draft: Callable[[], Draft]) -> Note:
        """Run a draft of a stored note, anew when another writer changed the note meanwhile."""
        for _ in range(MAX_CONFLICTS):
            try:
                return self._runner.drive(self._ingest().run([draft()]))[0]
            except ConflictError as error:
                _log.debug("another writer was first: %s", error)
                conflict = error
        raise conflict

    def delete(self, note_id: str) -> None:
        """Delete a note and every link to it, in one commit.

        Raises:
            NoteNotFoundError: This user has no such note.
        """

        def change(space: Workspace) -> None:
            note = space.get(note_id)
            if note is None:
                raise NoteNotFoundError(note_id, user=self.user)
            for link in note.links:
                space.unlink(note_id, link.id)
            space.after.pop(note_id)

        self._changed(change, cause=lambda _: "delete", by=note_id, delete=[note_id])

    def history(self, note_id: str) -> list[Revision]:
        """Return the note's revisions, oldest first: what it held before each change.

        Raises:
            NoteNotFoundError: This user has no such note.
        """
        return list(self.get(note_id).history)

    def undo(self, note_id: str) -> Note:
        """Take back the note's last change, with both ends of its links, in one commit.

        Raises:
            NoteNotFoundError: This user has no such note.
            InvalidInputError: There is no change left to take back.
        """

        def change(space: Workspace) -> None:
            note = space.get(note_id)
            if note is None:
                raise NoteNotFoundError(note_id, user=self.user)
            entry = last_change(note)
            if entry is None:
                raise InvalidInputError(f"note {note_id!r} has no change to take back")
            reverted(space, note, entry, self.policy)
            # What it would restore may be gone already; the undo is recorded all the same.
            if space.after[note_id] == note:
                space.put(note.model_copy(update={"revision": note.revision + 1}))

        stored = self._changed(
            change, cause=lambda key: "undo" if key == note_id else "relink", by=note_id
        )
        return next(note for note in stored if note.id == note_id)

    def _changed(
        self,
        change: Callable[[Workspace], None],
        *,
        cause: Callable[[str], Any],
        by: str,
        delete: Sequence[str] = (),
    ) -> list[Note]:
        """Apply `change` to what is stored and commit it; after a conflict read and apply again."""
        for _ in range(MAX_CONFLICTS):
            space = Workspace(self.user, lambda ids: self.store.get(self.user, ids))
            change(space)
            at = self._clock()
            notes = [
                recorded(space.before[n.id], n, cause=cause(n.id), by=by, at=at, policy=self.policy)
                for n in space.changed()
            ]
            try:
                written = commit(self.store, self.embedder, space, notes, delete=delete)
                return [row.note for row in written]
            except ConflictError as error:
                _log.debug("another writer was first: %s", error)
                conflict = error
        raise conflict

    def search(
        self,
        query: str,
        *,
        k: int = 10,
        mode: Mode = "hybrid",
        expand: bool = True,
        token_budget: int | None = None,
        min_score: float | None = None,
        tags: str | Sequence[str] | None = None,
        since: str | datetime | None = None,
        until: str | datetime | None = None,
        where: Mapping[str, MetadataValue] | None = None,
    ) -> list[Hit]:
        """Return the notes that fit the query best; calls no language model.

        The scale of the scores is the mode's: "dense" is the cosine with the full representation,
        in [-1, 1]; "text" is BM25, 0 and more; "hybrid" is 0.38 times the cosine with the content
        plus 0.62 times BM25 over the most that the query's words could reach, plus cues of up to
        0.5 in all (who speaks, a date that is named, a time where the query asks when, a reply, a
        full sentence), and -0.04 for a question. In BM25 a word of the card counts a fiftieth of
        one of the content. A linked note scores 0.6 times the link's strength times its origin.
        Scores fall; higher is better.

        A note of a conversation is read with the two before and after it, which count 0.7 and 0.4
        times. Where the query asks how something is now, of two notes that say nearly the same the
        newer comes first.

        Args:
            query: What to look for; a blank query finds nothing.
            k: Hits returned at most, linked and neighbouring notes included.
            mode: "dense", "text" or "hybrid".
            expand: Read notes with their conversations, and let links bring notes in.
            token_budget: Most tokens of the answer lines, by the embedder's tokenizer; contexts are
                left out of them.
            min_score: Hits below it are left out.
            tags: A tag, or several of which any will do.
            since: Not before this time (ISO 8601 or datetime).
            until: Not after this time.
            where: Metadata that must be equal.
        """
        k = whole_number(k, what="k", least=1)
        if token_budget is not None:
            token_budget = whole_number(token_budget, what="token_budget", least=0)
        if min_score is not None:
            min_score = bound(min_score, what="min_score")
        if mode not in ("dense", "text", "hybrid"):
            raise InvalidInputError(f'mode must be "dense", "text" or "hybrid"; got {mode!r}')
        chosen = NoteFilter(
            tags=tag_names(tags),
            since=None if since is None else aware_time(since, self._clock()),
            until=None if until is None else aware_time(until, self._clock()),
            where=flat_metadata(where),
        )
        if is_blank(asked_text(query, what="query")):
            return []
        asked = Query(query, k, mode, expand, token_budget, min_score, chosen)
        return Retriever(self.store, self.embedder, user=self.user).search(asked)

    async def asearch(self, query: str, **options: Any) -> list[Hit]:
        """Do what `search` does without blocking the event loop."""
        return await offload(self.search, query, **options)

    def ask(
        self, question: str, *, k: int = 10, token_budget: int | None = None
    ) -> dspy.Prediction:
        """Answer a question from the notes: rewrite the query, search, answer. Two model calls.

        Returns:
            A prediction with `answer` (str), `query` (what was searched) and `notes` (list of Hit).

        Raises:
            ExtractionError: No reply of the answerer validated.
        """
        self.store.open()
        query = self._query(question, self._runner.outcome(self._rewrite_call(question)))
        hits = self.search(query, k=k, token_budget=token_budget)
        outcome = self._runner.outcome(
            self._answer_call(question, hits, context=token_budget is None)
        )
        return self._answered(query, hits, outcome)

    async def aask(
        self, question: str, *, k: int = 10, token_budget: int | None = None
    ) -> dspy.Prediction:
        """Do what `ask` does without blocking the event loop."""
        await offload(self.store.open)
        query = self._query(question, await self._runner.aoutcome(self._rewrite_call(question)))
        hits = await self.asearch(query, k=k, token_budget=token_budget)
        outcome = await self._runner.aoutcome(
            self._answer_call(question, hits, context=token_budget is None)
        )
        return self._answered(query, hits, outcome)

    def _rewrite_call(self, question: str) -> Call:
        if is_blank(asked_text(question, what="question")):
            raise InvalidInputError("the question is blank")
        bounds = {"max_keywords": self.policy.max_keywords}
        return Call("rewrite_query", {"question": question}, bounds, "")

    def _query(self, question: str, outcome: Outcome) -> str:
        if outcome.failed:
            _log.warning("the question is searched as it is: %s", outcome.error)
        return " ".join([question, *outcome.values.get("keywords", ())])

    def _answer_call(self, question: str, hits: Sequence[Hit], *, context: bool) -> Call:
        notes = answer_context((hit.note for hit in hits), context=context)
        return Call("answer_question", {"question": question, "notes": notes}, {}, "")

    def _answered(self, query: str, hits: list[Hit], outcome: Outcome) -> dspy.Prediction:
        if outcome.error is not None and "answer" not in outcome.values:
            raise outcome.error
        return dspy.Prediction(answer=outcome.values["answer"], query=query, notes=hits)

    def usage(self) -> dict[str, StepUsage]:
        """Return calls, re-asks and tokens by step since this object was made."""
        return self._runner.meter.steps()


def _note_id(user: str, source: str | None) -> str:
    """Return a new id; with a source always the same one, so that a build can be repeated."""
    if source is None:
        return str(uuid.uuid4())
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"amem:{user!r}:{source}"))
