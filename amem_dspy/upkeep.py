"""What keeps a memory over the years: snapshots, exports, imports, and another embedder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from os import PathLike
from typing import BinaryIO

from amem_dspy.embedder import Embedder
from amem_dspy.exchange import ImportReport, export_notes, import_notes
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.reindex import reindex
from amem_dspy.snapshot import Snapshot, Snapshots
from amem_dspy.store import NoteStore

Progress = Callable[[int, int], None]


class Upkeep(ABC):
    """The part of `AgenticMemory` that calls no language model and concerns all of its notes.

    Attributes:
        user: Whose notes.
        policy: Its `max_history` and `max_links` bound what a restore or an import records.
        embedder: Makes vectors where a file or a snapshot has none of its own.
    """

    user: str
    policy: EvolutionPolicy
    embedder: Embedder
    _clock: Callable[[], datetime]

    @property
    @abstractmethod
    def store(self) -> NoteStore:
        """The notes on disk."""

    def delete_all(self, *, purge: bool = False) -> int:
        """Delete all notes of this user; return how many there were.

        Args:
            purge: Leave no trace: older versions of the table and the user's snapshots go too. The
                table is written anew without the user; that takes as long as copying the rest.

        Raises:
            StoreError: With `purge`, where somebody tagged an older version in LanceDB, or where a
                folder of a repair may hold the user's notes; nothing was deleted.
        """
        beside = self._snapshots().drop_all if purge else None
        return self.store.delete_user(self.user, purge=purge, beside=beside)

    def snapshot(self, name: str) -> Snapshot:
        """Keep the notes as they stand now under a name; takes as much room as they do.

        Raises:
            InvalidInputError: The name is blank, longer than 100 bytes, or taken.
        """
        return self._snapshots().create(name, at=self._clock())

    def snapshots(self) -> list[Snapshot]:
        """Return this user's snapshots, oldest first."""
        return self._snapshots().all()

    def restore(self, name: str) -> int:
        """Make this user's notes those of a snapshot and no others, in one commit.

        Notes changed since are changed back, with a revision that `undo` takes back; notes deleted
        since return; notes added since go. Other users' notes do not move.

        Returns:
            How many notes there are now.

        Raises:
            InvalidInputError: There is no such snapshot.
        """
        return self._snapshots().restore(name, at=self._clock(), policy=self.policy)

    def delete_snapshot(self, name: str) -> None:
        """Delete a snapshot of this user.

        Raises:
            InvalidInputError: There is no such snapshot.
        """
        self._snapshots().delete(name)

    def export(self, path: str | PathLike[str] | BinaryIO, *, vectors: bool = False) -> int:
        """Write all notes of this user, as they stand in one version, to a file of JSON lines.

        Args:
            path: Replaced in one step when all is written; or an open binary stream.
            vectors: Write the vectors too, so that an import needs no embedding.

        Returns:
            How many notes were written.
        """
        return export_notes(
            self.store, self.embedder, self.user, path, clock=self._clock, vectors=vectors
        )

    def import_(
        self, path: str | PathLike[str] | BinaryIO, *, progress: Progress | None = None
    ) -> ImportReport:
        """Add the notes of an export that are not here yet, all in one commit or none.

        Args:
            path: What `export` wrote; or an open binary stream of it.
            progress: Called with how many notes are embedded, and of how many.

        Raises:
            DataError: Lines are wrong, named by number; nothing was written.
        """
        return import_notes(
            self.store,
            self.embedder,
            self.user,
            path,
            policy=self.policy,
            clock=self._clock,
            progress=progress,
        )

    def reindex(self, *, progress: Progress | None = None) -> int:
        """Embed the whole store, all users' notes, with this memory's embedder.

        Readers with the old embedder go on until all is embedded, and then get
        `EmbedderMismatchError`. Stopped and called again, it goes on where it was.

        Args:
            progress: Called with how many notes are embedded, and of how many.

        Returns:
            How many notes were embedded; 0 where the store was made with this embedder.
        """
        return reindex(self.store.location, self.embedder, progress=progress)

    def _snapshots(self) -> Snapshots:
        return Snapshots(self.store, self.embedder, user=self.user)
