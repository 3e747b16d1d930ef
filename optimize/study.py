"""A study at work: arms compared unit by unit; what is finished is never done again.

The order gives comparable arms wherever it stops: all arms of a window before the next window,
windows in turn from each conversation, all windows of a seed before the next seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

import dspy
from filelock import FileLock, Timeout

from amem_dspy.adapter import InstructorAdapter
from amem_dspy.embedder import Embedder
from amem_dspy.errors import BudgetSpentError, ConfigError
from amem_dspy.optimize.build import MemoryBuilds
from amem_dspy.optimize.control import ANSWER_STEPS, mixed_program, prompts_hash
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.optimize.evaluation import QuestionRecord, evaluate
from amem_dspy.optimize.qa import ConversationQA
from amem_dspy.optimize.remembered import WRITE_STEPS, model_state
from amem_dspy.optimize.study_config import ArmConfig, StudyConfig
from amem_dspy.optimize.unit import (
    ArmRun,
    Cost,
    Head,
    Score,
    Setup,
    Unit,
    differences,
    unit_path,
)
from amem_dspy.optimize.windows import evidence_windows, window_key
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.program import MemoryProgram, resolve_program
from amem_dspy.usage import Meter

PACKAGES = ("amem-dspy", "dspy", "instructor", "lancedb")


@dataclass(frozen=True)
class Task:
    """A unit to do: an arm on a window; `seed` is None where nothing differs by seed."""

    arm: ArmConfig
    seed: int | None
    window: Conversation


@dataclass
class Progress:
    """How far a run came.

    Attributes:
        made: Units finished in this run.
        found: Units that were there.
        busy: Units left to another process that is at them.
        left: Other units not done.
        stopped: Why it ended early, or None.
    """

    made: int = 0
    found: int = 0
    busy: int = 0
    left: int = 0
    stopped: str | None = None


@dataclass
class Study:
    """A study over loaded data.

    Attributes:
        out: Folder of the units; committed, so without text.
        cache: Folder of the built memories, which hold the text.
        progress: As in `MemoryBuilds`.
    """

    config: StudyConfig
    arms: Sequence[ArmConfig]
    conversations: Sequence[Conversation]
    data_sha256: str
    lm: dspy.BaseLM
    embedder: Embedder
    out: Path
    cache: Path
    meter: Meter = field(default_factory=Meter)
    progress: Callable[[Conversation, int], None] | None = None

    def __post_init__(self) -> None:
        wanted = self.config.data.sha256
        if wanted is not None and wanted != self.data_sha256:
            raise ConfigError(
                f"the study is about the data with SHA-256 {wanted[:12]}..., "
                f"this file has {self.data_sha256[:12]}...; name the right one with --data"
            )
        self.lm = self.lm.copy(**self.config.model_settings)

    @cached_property
    def windows(self) -> list[Conversation]:
        """The windows, in turn from each conversation.

        Raises:
            ConfigError: The data lack a conversation of the part.
        """
        known = {one.id: one for one in self.conversations}
        wanted, cut = self.config.data.conversations, self.config.windows
        if missing := [name for name in wanted if name not in known]:
            raise ConfigError(
                f"the data hold no conversation {', '.join(missing)}; there are {', '.join(known)}"
            )
        rows = [
            evidence_windows(
                known[name],
                turns=cut.turns,
                count=cut.count,
                seed=cut.seed,
                categories=cut.categories,
            )
            for name in wanted
        ]
        return [window for row in zip_longest(*rows) for window in row if window is not None]

    @property
    def sampled(self) -> bool:
        """Whether the model's replies differ by seed; a provider's default is taken for such."""
        temperature = self.lm.kwargs.get("temperature")
        return temperature is None or temperature > 0

    def tasks(self) -> Iterator[list[Task]]:
        """Yield the units in order, those of one window and seed together."""
        for place, seed in enumerate(self.config.seeds):
            seeded = [arm for arm in self.arms if arm.seeded or self.sampled]
            for window in self.windows:
                arms = self.arms if place == 0 else seeded
                yield [Task(arm, seed if arm in seeded else None, window) for arm in arms]

    def path(self, task: Task) -> Path:
        """Return the file of a unit."""
        return unit_path(self.out, window_key(task.window), task.arm.name, task.seed)

    @cached_property
    def setup(self) -> Setup:
        """What all units share."""
        name, settings = model_state(self.lm)
        return Setup(
            study=self.config.name,
            data_sha256=self.data_sha256,
            part=self.config.data.part,
            categories=self.config.windows.categories,
            model=name,
            model_settings=settings,
            embedder=self.embedder.id,
            policy=self.config.policy.values(),
            wave=self.config.wave,
            k=self.config.retrieval.k,
            token_budget=self.config.retrieval.token_budget,
        )

    def program(self, task: Task) -> MemoryProgram:
        """Return the program of a unit, put together of its arm's halves."""
        memory, answerer = (
            resolve_program(None if name is None else name.format(seed=task.seed))
            for name in (task.arm.memory, task.arm.answerer)
        )
        return mixed_program(memory, answerer)

    def check(self) -> None:
        """Load every program, so that one that is missing shows before anything is paid.

        Raises:
            ConfigError: One is not there, or is no program.
        """
        for task in {(t.arm, t.seed): t for group in self.tasks() for t in group}.values():
            self.program(task)

    def run(self, on_unit: Callable[[Unit, Progress], None] | None = None) -> Progress:
        """Do what is not done yet; another process may share the work, window by window.

        A unit that is stopped leaves nothing but its write calls, which are not paid again.

        Raises:
            ConfigError: A unit that is there was measured with something else, or a program is
                missing.
            ModelError: The model failed; it is never scored as a zero.
        """
        self.check()
        groups = list(self.tasks())
        progress = Progress(found=sum(self._done(task) for group in groups for task in group))
        total = sum(map(len, groups))
        try:
            for group in groups:
                self._group(group, progress, on_unit)
        except BudgetSpentError as error:
            progress.stopped = str(error)
        progress.left = total - progress.found - progress.made - progress.busy
        return progress

    def _group(
        self,
        group: Sequence[Task],
        progress: Progress,
        on_unit: Callable[[Unit, Progress], None] | None,
    ) -> None:
        open_tasks = [task for task in group if not self.path(task).exists()]
        if not open_tasks:
            return
        locks = self.cache / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        try:
            # Freed by the system when its process dies.
            with FileLock(locks / f"{self.path(group[0]).parent.name}", timeout=0):
                for task in open_tasks:
                    if self.path(task).exists():
                        progress.found += 1
                        continue
                    unit = self.measure(task)
                    unit.write(self.path(task))
                    progress.made += 1
                    if on_unit:
                        on_unit(unit, progress)
        except Timeout:
            progress.busy += len(open_tasks)

    def _done(self, task: Task) -> bool:
        path = self.path(task)
        if not path.exists():
            return False
        head = Unit.read(path).head
        found = differences(self.setup, head.setup) or differences(
            self._arm(task, self.program(task)), head.arm
        )
        if found:
            raise ConfigError(
                f"{path} was measured with other {found}; give another --out, "
                "or the arm another name"
            )
        return True

    def _arm(self, task: Task, program: MemoryProgram) -> ArmRun:
        arm = task.arm
        return ArmRun(
            name=arm.name,
            seed=task.seed,
            raw=arm.raw,
            memory=arm.memory and Path(arm.memory).name,
            answerer=arm.answerer and Path(arm.answerer).name,
            memory_prompts="" if arm.raw else prompts_hash(program, WRITE_STEPS),
            answerer_prompts=prompts_hash(program, ANSWER_STEPS),
        )

    def measure(self, task: Task) -> Unit:
        """Build the memory of a window, or find it, and ask its questions."""
        program = self.program(task)
        builds = MemoryBuilds(
            embedder=self.embedder,
            policy=EvolutionPolicy.raw() if task.arm.raw else self.config.policy,
            cache=self.cache,
            wave=self.config.wave,
            meter=self.meter,
            progress=self.progress,
        )
        retrieval = self.config.retrieval
        qa = ConversationQA(
            program, builds=builds, k=retrieval.k, token_budget=retrieval.token_budget
        )
        lm = self.lm.copy(seed=task.seed) if self.sampled else self.lm
        with dspy.context(lm=lm, adapter=InstructorAdapter()):
            cost = _memory(builds, program, task.window)
            made = evaluate(
                qa,
                [task.window],
                categories=self.config.windows.categories,
                failures_allowed=0,
            )
        return self._unit(task, program, cost, made.records)

    def _unit(
        self, task: Task, program: MemoryProgram, cost: Cost, records: Sequence[QuestionRecord]
    ) -> Unit:
        head = Head(
            setup=self.setup,
            arm=self._arm(task, program),
            conversation=task.window.id,
            window=window_key(task.window),
            questions=len(records),
            versions={name: version(name) for name in PACKAGES},
            memory=cost,
        )
        return Unit(head, tuple(Score.of(record) for record in records))


def _memory(builds: MemoryBuilds, program: MemoryProgram, window: Conversation) -> Cost:
    """Build the memory, or find it, and return what it is and cost."""
    before, started = builds.meter.total(), time.perf_counter()
    build = builds.get(program, window)
    after, seconds = builds.meter.total(), time.perf_counter() - started
    with builds.open(program, build) as memory:
        notes = memory.all()
    return Cost(
        notes=len(notes),
        pending=sum(note.pending for note in notes),
        links=sum(len(note.links) for note in notes),
        calls=after.calls - before.calls,
        cached=after.cached - before.cached,
        tokens=after.tokens - before.tokens,
        seconds=round(seconds, 1),
    )
