"""Export and import of a user's notes as a file that loses nothing."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, BinaryIO

from amem_dspy.embedder import Embedder
from amem_dspy.errors import ConflictError, DataError, SourceConflictError
from amem_dspy.inputs import aware_time
from amem_dspy.intake import check_file, file_name, read_notes
from amem_dspy.line import EmbedderName, Header, header_line, row_line
from amem_dspy.merge import ImportReport, Merge
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.stage import Stage
from amem_dspy.store import NoteStore

__all__ = ["ImportReport", "export_notes", "import_notes"]

MAX_CONFLICTS = 20
File = str | os.PathLike[str] | BinaryIO

_log = logging.getLogger(__name__)


def export_notes(
    store: NoteStore,
    embedder: Embedder,
    user: str,
    path: File,
    *,
    clock: Callable[[], datetime],
    vectors: bool = False,
) -> int:
    """Write all notes of a user, as they were at one moment, to a file; return how many.

    The file takes its name when it is complete, and replaces one of that name.

    Args:
        store: Where the notes are.
        embedder: The store's embedder, for the header.
        user: Whose notes.
        path: A file, or an open binary stream.
        clock: Returns the current time.
        vectors: Write the vectors too, so that an import need not embed.

    Raises:
        InvalidInputError: `path` is neither a file's name nor a binary stream.
        DataError: The file cannot be written.
    """
    check_file(path, "write")
    now = clock()
    header = Header(
        user=user,
        notes=0,
        created=aware_time(now, now),
        embedder=EmbedderName(id=embedder.id, dimension=embedder.dimension) if vectors else None,
    )
    with _written(path) as file:
        file.write(header_line(header))
        count = 0
        for rows in store.stream(user):
            file.writelines(row_line(row, vectors=vectors) for row in rows)
            count += len(rows)
        file.seek(0)
        file.write(header_line(header.model_copy(update={"notes": count})))
    return count


def import_notes(
    store: NoteStore,
    embedder: Embedder,
    user: str,
    path: File,
    *,
    policy: EvolutionPolicy,
    clock: Callable[[], datetime],
    progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Add the notes of an export file to a user's, all in one commit or none.

    Notes that are there already stay as they are, so a second import changes nothing; of those of
    which the file has a later revision, that comes in. Another user's notes, and those whose id
    another user of the store has, get ids of their own, always the same.

    Args:
        store: Where the notes go.
        embedder: Makes the vectors, where the file has none of this embedder.
        user: Whose notes they become.
        path: A file that `export_notes` wrote, or lines of it, or an open binary stream.
        policy: Bounds the links and history of notes that are there already.
        clock: Returns the current time.
        progress: Called with how many notes are embedded, and of how many.

    Raises:
        InvalidInputError: `path` is neither a file's name nor a binary stream.
        DataError: The file cannot be read or is no export, or lines are wrong or do not fit the
            store; names them by number. Nothing was written.
        ConflictError: Other writers came first many times in a row; nothing was written.
    """
    check_file(path, "read")
    with Stage() as stage:
        left_out = read_notes(path, stage, user=user, embedder=embedder)
        merge = Merge(store, embedder, user, policy, clock, stage, file_name(path), left_out)
        for _ in range(MAX_CONFLICTS - 1):
            try:
                return merge.run(progress)
            except (ConflictError, SourceConflictError) as error:
                _log.debug("another writer was first: %s", error)
        return merge.run(progress)


@contextmanager
def _written(target: File) -> Iterator[IO[bytes]]:
    """Open a seekable file that reaches its target when it is complete, or not at all."""
    if not isinstance(target, str | os.PathLike):
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            shutil.copyfileobj(file, target)
            target.flush()
        return
    path = Path(target).expanduser().resolve()
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # A pipe or device cannot be replaced.
            with path.open("wb") as device, _written(device) as file:
                yield file
            return
        with _replacing(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror or error})") from error


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
