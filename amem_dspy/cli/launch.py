"""A compile before its search: models, limits, the run's folder, the estimate, the pre-flight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy

from amem_dspy import models
from amem_dspy.cli import bench
from amem_dspy.cli.compiling import Study
from amem_dspy.cli.session import Session
from amem_dspy.errors import ConfigError
from amem_dspy.optimize.account import Account, accounted, fresh_cache
from amem_dspy.optimize.build import MemoryBuilds
from amem_dspy.optimize.compile import REFLECTION, CompileOptions
from amem_dspy.optimize.estimate import Estimate, estimate
from amem_dspy.optimize.journal import Journal, Rate
from amem_dspy.optimize.ledger import state_key
from amem_dspy.optimize.optimizer import optimizer_named
from amem_dspy.optimize.preflight import known_price, preflight
from amem_dspy.optimize.qa import ConversationQA
from amem_dspy.optimize.remembered import model_state
from amem_dspy.optimize.run_folder import RunFolder, run_folder
from amem_dspy.optimize.split import Split
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.program import STARTER, resolve_program
from amem_dspy.redaction import is_secret_name
from amem_dspy.usage import BudgetMeter, Meter, Price

TEACHER = "teacher"
_TASK = "task"


@dataclass(frozen=True)
class Launch:
    """All that `amem compile` was told.

    Attributes:
        limits: Arguments of the budget.
        price: As --price says it.
        raw: Whether notes are turns as they are.
        resume: The run's folder.
    """

    session: Session
    split: Split
    options: CompileOptions
    data_hash: str
    teacher: str | None
    teacher_lm: str | None
    reflection_lm: str | None
    price: str | None
    raw: bool
    limits: Mapping[str, Any]
    k: int
    token_budget: int | None
    wave: int
    cache: Path
    resume: Path | None

    def dry(self, calls_a_minute: float | None) -> Estimate:
        """Return what it would cost; no model is asked, and nothing is written.

        Args:
            calls_a_minute: How fast the model is; None for what the run's folder says of it.

        Raises:
            ConfigError: As in `study`, where it does not take a model to know.
        """
        named = self._models()
        prices = self._prices(named)
        rate = None
        if calls_a_minute is not None:
            rate = Rate(calls=1, seconds=60 / calls_a_minute)
        elif self.resume is not None:
            rate = Journal(self.resume / "journal.jsonl").rate()
        qa = self._qa(self._builds(self.cache, Meter()))
        return estimate(qa, self.split, self.options, price=prices[_TASK], rate=rate)

    @contextmanager
    def study(self) -> Iterator[Study]:
        """Yield what the search works on, once its models have answered.

        Raises:
            ConfigError: The settings do not fit, the price is not known, or the run's folder is of
                another run.
            ModelError: A model is not there.
        """
        named = self._models()
        prices = self._prices(named)
        meter = BudgetMeter(**self.limits)
        with ExitStack() as stack:
            folder = stack.enter_context(self._folder(named))
            journal = folder.journal if folder else None
            lms = {
                role: accounted(lm, self._account(role, prices[role], meter, journal))
                for role, lm in named.items()
            }
            stack.enter_context(bench.model_context(lms[_TASK]))
            bars = stack.enter_context(self.session.output.bars())
            builds = self._builds(folder.builds if folder else self.cache, meter)
            builds.progress = bench.build_progress(bars)
            qa = self._qa(builds)
            rate = self._preflight(qa, lms, journal)
            found = estimate(qa, self.split, self.options, price=prices[_TASK], rate=rate)
            for line in found.lines():
                self.session.output.say(line)
            yield Study(
                qa,
                self.split,
                self.options,
                self.data_hash,
                teacher=self.teacher,
                teacher_lm=lms.get(TEACHER),
                reflection_lm=lms.get(REFLECTION),
                journal=journal,
            )

    def _models(self) -> dict[str, dspy.BaseLM]:
        """Return the models by what they do.

        Raises:
            ConfigError: The optimiser, one of its settings, the teacher or a model's name cannot
                be, or an extra is missing.
        """
        optimizer = optimizer_named(self.options.optimizer)
        optimizer.require(optimizer.settings(self.options.knobs))
        resolve_program(self.teacher)
        named = {TEACHER: self.teacher_lm, REFLECTION: self.reflection_lm}
        found = {role: models.named_lm(name) for role, name in named.items() if name}
        return {_TASK: self.session.lm, **found}

    def _prices(self, named: Mapping[str, dspy.BaseLM]) -> dict[str, Price | None]:
        """Return what the models cost.

        Raises:
            ConfigError: There is a limit on money, and a price is not known.
        """
        given = Price.parse(self.price) if self.price else None
        prices = {role: known_price(lm) or given for role, lm in named.items()}
        prices[_TASK] = given or prices[_TASK]
        unknown = [named[role].model for role, price in prices.items() if price is None]
        if self.limits["max_cost"] is not None and unknown:
            raise ConfigError(
                f"--max-cost needs a price, and that of {unknown[0]} is not known; say it with "
                "--price IN/OUT (USD per million tokens), or limit --max-tokens"
            )
        return prices

    def _account(
        self, role: str, price: Price | None, meter: Meter, journal: Journal | None
    ) -> Account:
        step = TEACHER if role == TEACHER else REFLECTION
        # The task model too proposes instructions where no other is named.
        said = role == _TASK and self.price is not None
        return Account(meter, step, price=price, listed=not said, journal=journal)

    @contextmanager
    def _folder(self, named: Mapping[str, dspy.BaseLM]) -> Iterator[RunFolder | None]:
        if self.resume is None:
            yield None
            return
        with run_folder(self.resume, self._manifest(named)) as folder, fresh_cache():
            yield folder

    def _manifest(self, named: Mapping[str, dspy.BaseLM]) -> dict[str, Any]:
        """Return what the result depends on; not the limits, which a run may be given more of."""
        optimizer = optimizer_named(self.options.optimizer)
        teacher = self.teacher
        if teacher and teacher != STARTER:
            teacher = bench.file_hash(Path(teacher))
        return {
            "options": self.options.model_dump(mode="json", exclude={"threads", "knobs"}),
            "knobs": optimizer.settings(self.options.knobs),
            "models": {role: _plain_model(lm) for role, lm in named.items()},
            "teacher": teacher,
            "embedder": self.session.embedder.id,
            "retrieval": {"k": self.k, "token_budget": self.token_budget},
            "program": state_key(resolve_program(self.session.settings.program)),
            "raw": self.raw,
            "wave": self.wave,
            "data_sha256": self.data_hash,
            "split": self.split.names(),
        }

    def _builds(self, cache: Path, meter: Meter) -> MemoryBuilds:
        embedder = self.session.embedder
        policy = EvolutionPolicy.raw() if self.raw else None
        return MemoryBuilds(
            embedder=embedder, policy=policy, cache=cache, wave=self.wave, meter=meter
        )

    def _qa(self, builds: MemoryBuilds) -> ConversationQA:
        return ConversationQA(
            resolve_program(self.session.settings.program),
            builds=builds,
            k=self.k,
            token_budget=self.token_budget,
        )

    def _preflight(
        self, qa: ConversationQA, lms: Mapping[str, dspy.BaseLM], journal: Journal | None
    ) -> Rate:
        """Ask every model; return how fast they are, or were in an earlier start of the run."""
        meter = qa.builds.meter
        asked = {lm.model: lm for lm in reversed([*lms.values()])}
        first = self.split.train[0]
        rates = {name: preflight(qa.memory, first, lm, meter=meter) for name, lm in asked.items()}
        earlier = journal.rate() if journal else None
        return earlier or rates[lms[_TASK].model]


def _plain_model(lm: dspy.BaseLM) -> dict[str, Any]:
    name, settings = model_state(lm)
    open_ones = {k: v for k, v in settings.items() if v is None or not is_secret_name(k)}
    return {"name": name, "settings": open_ones | _limits_of(settings)}


def _limits_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    # "max_tokens" has a key's word in its name.
    return {key: value for key, value in settings.items() if key.startswith("max_")}
