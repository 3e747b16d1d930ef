"""Where a repair puts what it takes out of a store: nothing is deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from amem_dspy.note import Note

PREFIX = "damaged-"
NOTES = "notes.jsonl"
BEFORE_MENDING = "before-mending.jsonl"


def put_aside(store: Path | None) -> list[Path]:
    """Return the folders that repairs of a store have made; they hold notes of all users."""
    return sorted(store.glob(f"{PREFIX}*")) if store is not None else []


class Aside:
    """The folder `damaged-<UTC time>` in a store's folder; made when something is put there.

    Args:
        store: The store's folder; what is put aside keeps its place below it.
        now: UTC, for the name.
    """

    def __init__(self, store: Path, now: datetime) -> None:
        self._store = store
        self._name = f"{PREFIX}{now:%Y%m%dT%H%M%SZ}"
        self._folder: Path | None = None
        self.moved: list[str] = []

    @property
    def folder(self) -> Path | None:
        """The folder, once something is in it."""
        return self._folder

    def move(self, path: Path) -> None:
        """Move a file or folder of the store aside; one that is not there is left."""
        if path.exists():
            path.rename(self._place(path))
            self.moved.append(path.relative_to(self._store).as_posix())

    def copy(self, path: Path) -> None:
        """Put a file aside and leave it in its place too."""
        if not path.is_file():
            return
        place = self._place(path)
        try:
            os.link(path, place)
        except OSError:
            # Not every file system has links.
            shutil.copy2(path, place)

    def drop(self, path: Path) -> None:
        """Take away a file that `copy` has put aside."""
        if path.is_file():
            path.unlink()
            self.moved.append(path.relative_to(self._store).as_posix())

    def write(self, name: str, notes: Iterable[Note]) -> None:
        """Append notes to a file, one JSON document a line; without notes there is none."""
        target = self._made() / name
        with target.open("a", encoding="utf-8") as stream:
            for note in notes:
                stream.write(note.model_dump_json() + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        if not target.stat().st_size:
            target.unlink()

    def _place(self, path: Path) -> Path:
        place = self._made() / path.relative_to(self._store)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _made(self) -> Path:
        number = 1
        while self._folder is None:
            name = self._name if number == 1 else f"{self._name}-{number}"
            try:
                (self._store / name).mkdir()
                self._folder = self._store / name
            except FileExistsError:
                number += 1
        return self._folder
