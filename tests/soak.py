"""Stress one store: processes and threads write, change, delete and read, and some are killed.

    python -m tests.soak --minutes 5

Several processes, each with several threads, work on the notes of the same two users, and one
thread of each on a user of its own; a supervisor ends random processes with `kill -9` at random
moments and starts others. Before an operation begins and after it is acknowledged, its process
writes a line into a journal. Afterwards everything that the journals acknowledge is compared with
what the store holds, and the store's invariants are checked. The exit status is 1 if anything was
lost or is not sound.

The model is scripted, so every run costs nothing; the seed fixes what each thread does and when the
supervisor kills, but not how the system interleaves them.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import dspy

from amem_dspy import AgenticMemory
from amem_dspy.integrity import check_store
from tests.soak_actor import (
    POLICY,
    USERS,
    Actor,
    Journal,
    Keeper,
    Listener,
    ScriptedModel,
    WordEmbedder,
)
from tests.soak_check import Comparison, Record, keeper_losses

STOP_SECONDS = 120.0
OPERATIONS_BETWEEN_KILLS = (15, 60)


def work(options: argparse.Namespace, folder: Path, name: str, supervisor: Connection) -> None:
    """Be one process: run the threads until the supervisor says stop, or is gone."""
    with (folder / f"{name}.err").open("wb") as errors:
        os.dup2(errors.fileno(), 2)
    listener = Listener(Journal(folder / f"{name}.jsonl"))
    logger = logging.getLogger("amem_dspy")
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    threading.excepthook = lambda died: listener.journal.write(
        warning=f"ended by {died.exc_value!r}"
    )
    dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)
    shared, stop = memories(options, name, USERS), threading.Event()
    # One thread has handles of its own, the others share theirs; one has a user of its own.
    handles = [memories(options, name, USERS), *([shared] * (options.threads - 2))]
    actors: list[Actor] = [
        Actor(f"{name}.{number}", options.seed, handle, folder, listener)
        for number, handle in enumerate(handles)
    ]
    own = memories(options, name, [f"keeper-{name}"])
    actors.append(Keeper(f"{name}.keeper", options.seed, own, folder, listener))
    threads = [threading.Thread(target=actor.run, args=(stop,)) for actor in actors]
    for thread in threads:
        thread.start()
    supervisor.poll(None)
    stop.set()
    for thread in threads:
        thread.join()


def memories(
    options: argparse.Namespace, name: str, users: Iterable[str]
) -> dict[str, AgenticMemory]:
    engine = ScriptedModel(f"{options.seed}/{name}")
    lm = dspy.LM("scripted/soak", engine=engine, cache=False, num_retries=0, max_tokens=200)
    return {
        user: AgenticMemory(options.store, user=user, lm=lm, embedder=WordEmbedder(), policy=POLICY)
        for user in users
    }


@dataclass
class Report:
    """The outcome of a run."""

    seed: int
    seconds: float
    operations: int
    by_kind: dict[str, int]
    refused: dict[str, int]
    conflicts: int
    processes: int
    kills: int
    unanswered: int
    notes: int
    files: int
    files_optimized: int
    losses: list[str]
    problems: list[str]

    @property
    def clean(self) -> bool:
        return not self.losses and not self.problems

    def text(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.by_kind.items())
        refused = ", ".join(f"{name} {count}" for name, count in self.refused.items()) or "none"
        lines = [
            f"{self.operations} operations acknowledged in {self.seconds:.0f} s ({kinds})",
            f"refused as they should be: {refused}",
            f"{self.conflicts} conflicts, the loser read again and redid its work",
            f"{self.processes} processes, {self.kills} of them killed; "
            f"{self.unanswered} operations were under way",
            f"{self.notes} notes in {self.files} files, {self.files_optimized} once optimised",
            *(f"LOST: {loss}" for loss in self.losses[:20]),
            *(f"PROBLEM: {problem}" for problem in self.problems[:20]),
            f"losses: {len(self.losses)}, problems: {len(self.problems)} (seed {self.seed})",
        ]
        return "\n".join(lines)


class Process(NamedTuple):
    """A process at work, and the supervisor's end of the pipe to it."""

    process: BaseProcess
    supervisor: Connection

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.supervisor.close()


class Supervisor:
    """Starts processes, kills some, and reports what became of the store."""

    def __init__(self, options: argparse.Namespace, journal: Path) -> None:
        self.options = options
        self.journal = journal
        self.random = random.Random(options.seed)
        self.running: dict[str, Process] = {}
        self.died: dict[str, int] = {}
        self.problems: list[str] = []
        self.started = 0
        self.kills = 0
        self.answers = 0
        self.read: dict[Path, int] = {}

    def run(self) -> Report:
        begin = time.monotonic()
        try:
            for _ in range(self.options.processes):
                self._start()
            next_kill = self.random.randrange(*OPERATIONS_BETWEEN_KILLS)
            while not self._done(time.monotonic() - begin):
                time.sleep(self.random.uniform(0, 0.1))
                self._replace_failed()
                if self._acknowledged() >= next_kill:
                    self._kill_one()
                    next_kill += self.random.randrange(*OPERATIONS_BETWEEN_KILLS)
            self._stop()
        finally:
            for running in self.running.values():
                running.kill()
        return self._report(time.monotonic() - begin)

    def _start(self) -> None:
        name = f"p{self.started}"
        self.started += 1
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(
            target=work, args=(self.options, self.journal, name, theirs)
        )
        process.start()
        theirs.close()
        self.running[name] = Process(process, ours)

    def _done(self, seconds: float) -> bool:
        enough = self.options.operations and self._acknowledged() >= self.options.operations
        return bool(enough) or seconds > self.options.minutes * 60

    def _acknowledged(self) -> int:
        """Return how many operations were answered so far, reading only what is new."""
        for journal in self.journal.glob("*.jsonl"):
            with journal.open("rb") as file:
                file.seek(self.read.get(journal, 0))
                self.answers += file.read().count(b'"error":')
                self.read[journal] = file.tell()
        return self.answers

    def _kill_one(self) -> None:
        at_work = [name for name in self.running if (self.journal / f"{name}.jsonl").exists()]
        name = self.random.choice(at_work)
        self.running.pop(name).kill()
        self.kills += 1
        self.died[name] = time.monotonic_ns()
        self._start()

    def _replace_failed(self) -> None:
        for name, running in list(self.running.items()):
            if not running.process.is_alive():
                self.running.pop(name)
                self.died[name] = time.monotonic_ns()
                errors = (self.journal / f"{name}.err").read_text("utf-8", errors="replace")
                code = running.process.exitcode
                self.problems.append(f"process {name} ended with {code}: {errors[-500:]}")
                self._start()

    def _stop(self) -> None:
        for running in self.running.values():
            running.supervisor.close()
        for name, running in self.running.items():
            running.process.join(STOP_SECONDS)
            if running.process.exitcode != 0:
                self.problems.append(f"process {name} ended with {running.process.exitcode}")

    def _report(self, seconds: float) -> Report:
        record = Record.read(self.journal, self.died)
        every = record.operations.values()
        users = {*USERS, *(operation.user for operation in every)}
        memory = memories(self.options, "check", users)
        losses: list[str] = []
        problems = [*self.problems, *record.warnings]
        for user in sorted(users):
            mine = [operation for operation in every if operation.user == user]
            notes = memory[user].all()
            compared = Comparison(mine, notes)
            losses += compared.losses() if user in USERS else keeper_losses(mine, notes)
            problems += compared.problems()
        problems += map(str, check_store(self.options.store).problems)
        files = count_files(self.options.store)
        memory[USERS[0]].store.optimize()
        return Report(
            seed=self.options.seed,
            seconds=round(seconds, 1),
            operations=sum(operation.acknowledged for operation in every),
            by_kind=dict(Counter(o.kind for o in every if o.acknowledged).most_common()),
            refused=dict(Counter(o.error for o in every if o.error).most_common()),
            conflicts=sum(operation.conflicts for operation in every),
            processes=self.started,
            kills=self.kills,
            unanswered=sum(o.error is None and not o.acknowledged for o in every),
            notes=sum(each.count() for each in memory.values()),
            files=files,
            files_optimized=count_files(self.options.store),
            losses=losses,
            problems=problems,
        )


def count_files(store: Path) -> int:
    return sum(path.is_file() for path in store.rglob("*"))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default 5)")
    parser.add_argument("--operations", type=int, help="stop earlier, after so many operations")
    parser.add_argument("--store", type=Path, help="an empty folder to keep (default: temporary)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=4, help="at a time (default 4)")
    parser.add_argument(
        "--threads", type=int, default=4, help="of each process, 2 or more (default 4)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    if options.store and options.store.exists():
        parser.error(f"{options.store} is there already; name a new folder")
    return options


def main() -> int:
    options = parsed()
    folder = Path(tempfile.mkdtemp(prefix="amem-soak-"))
    options.store = options.store or folder / "store"
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("forkserver")
        # What takes long to import and starts no thread, so that a new process costs little.
        multiprocessing.set_forkserver_preload(["dspy", "instructor", "pyarrow"])
    else:
        multiprocessing.set_start_method("spawn")
    report = Supervisor(options, folder).run()
    print(json.dumps(asdict(report), indent=2) if options.json else report.text())
    if report.clean:
        shutil.rmtree(folder)
    else:
        print(f"the journals are in {folder}, the store is {options.store}", file=sys.stderr)
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())
