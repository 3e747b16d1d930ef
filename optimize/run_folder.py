"""The folder of a run that can be killed and started again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from amem_dspy.errors import ConfigError, DataError
from amem_dspy.optimize.journal import Journal

FORMAT = 1


@dataclass(frozen=True)
class RunFolder:
    """An open folder: `journal` holds the paid replies, `builds` the memories written by now.

    The memories are written anew each time the run is started, from the journal and without a
    model: so all that is counted, and with it every limit, is as in a run that was never killed.
    """

    journal: Journal
    builds: Path


@contextmanager
def run_folder(folder: Path, settings: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Open a run's folder, a new one or that of a run with the same settings.

    Args:
        folder: Made where it is not there.
        settings: Plain values of all that the result depends on; no keys.

    Raises:
        ConfigError: It is the folder of another run, of a run that is at work, or of something
            else; the message names what differs.
        DataError: Its files were changed.
    """
    _refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigError(f"another run is at work in {folder}; name another folder") from error
    try:
        _check(folder, settings)
        builds = folder / "builds"
        shutil.rmtree(builds, ignore_errors=True)
        yield RunFolder(Journal(folder / "journal.jsonl"), builds)
    finally:
        lock.release()


def _refuse_foreign(folder: Path) -> None:
    held = sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in held if not name.startswith("lock")]
    if others and "manifest.json" not in others:
        raise ConfigError(
            f"{folder} is no run's folder and holds {others[0]}; name an empty or a new folder"
        )


def _check(folder: Path, settings: Mapping[str, Any]) -> None:
    """Compare the settings with those of the folder's run, or write them down for a new one."""
    path = folder / "manifest.json"
    plain = json.loads(json.dumps({"format": FORMAT, **settings}, default=str))
    if not path.exists():
        work = path.with_name("lock.manifest")
        work.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        work.replace(path)
        return
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no manifest of a run: the file was changed") from error
    if differing := sorted(_differences(known, plain)):
        raise ConfigError(
            f"{folder} is the folder of a run with other settings ({'; '.join(differing)}); "
            "start it with the same ones, or name another folder"
        )


def _differences(known: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield what differs, as "seed: 1 there, 2 now"."""
    if isinstance(known, dict) and isinstance(now, dict):
        for key in known.keys() | now.keys():
            yield from _differences(known.get(key), now.get(key), f"{where}.{key}".lstrip("."))
    elif known != now:
        yield f"{where}: {_short(known)} there, {_short(now)} now"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
