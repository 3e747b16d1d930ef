"""The summary of a study, made from its units alone: the same units give the same bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from amem_dspy.optimize.conversation import CATEGORY_NAMES
from amem_dspy.optimize.interval import CLUSTERS_FROM, FEW_CLUSTERS, FEW_QUESTIONS, Place
from amem_dspy.optimize.table import Comparison, Row, by_conversation, compare, mean, rows, share
from amem_dspy.optimize.unit import ArmRun, Score, Setup, Unit, read_units

_Cells = Sequence[str]


@dataclass(frozen=True)
class Averaged:
    """A question of an arm, averaged over the arm's seeds."""

    question_id: str
    place: Place
    category: int
    official: float
    paper_f1: float
    evidence_recall: float | None


@dataclass(frozen=True)
class ArmUnits:
    """The units of one arm."""

    run: ArmRun
    units: tuple[Unit, ...]

    @cached_property
    def scores(self) -> list[Score]:
        """All questions, once a seed."""
        return [score for unit in self.units for score in unit.scores]

    @cached_property
    def questions(self) -> list[Averaged]:
        """All questions, once, in the order of their ids."""
        groups: dict[str, list[tuple[Place, Score]]] = defaultdict(list)
        for unit in self.units:
            for score in unit.scores:
                groups[score.question_id].append((unit.place, score))
        return [_averaged(groups[key]) for key in sorted(groups)]

    @property
    def seeds(self) -> list[int]:
        """The seeds, where anything differs by seed."""
        return sorted({u.head.arm.seed for u in self.units if u.head.arm.seed is not None})

    @property
    def windows(self) -> set[Place]:
        """The windows measured."""
        return {unit.place for unit in self.units}


def summary(folder: Path) -> str:
    """Return the summary as Markdown.

    Raises:
        DataError: A unit is damaged, or units of different studies lie there.
    """
    units = list(read_units(folder))
    if not units:
        return "# Study\n\nNo unit is finished.\n"
    arms = _arms(units)
    blocks = [
        _heading(units[0].head.setup, arms),
        "## Arms",
        _table(_ARM_HEAD, (_arm_cells(arm) for arm in arms)),
        _incomplete(arms),
        "## Comparisons, paired by question",
        _comparisons(arms),
        "## By category: official F1 / paper F1, percent (n)",
        _category_table(arms),
        "## By conversation: official F1 / paper F1, percent (n)",
        _conversation_table(arms),
        _seed_section(arms),
        "## What the memories are and cost",
        _table(_COST_HEAD, (_cost_cells(arm) for arm in arms)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _averaged(found: Sequence[tuple[Place, Score]]) -> Averaged:
    scores = [score for _, score in found]
    return Averaged(
        question_id=scores[0].question_id,
        place=found[0][0],
        category=scores[0].category,
        official=mean([score.locomo_f1 for score in scores]),
        paper_f1=mean([score.paper["f1"] for score in scores]),
        evidence_recall=share(scores, "evidence_recall"),
    )


def _arms(units: Iterable[Unit]) -> list[ArmUnits]:
    """Return the arms: untuned memories first, then compiled ones, then plain retrieval."""
    groups: dict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        groups[unit.head.arm.name].append(unit)
    arms = [ArmUnits(group[0].head.arm, tuple(group)) for group in groups.values()]
    return sorted(
        arms,
        key=lambda arm: (
            arm.run.raw,
            arm.run.memory or "",
            arm.run.answerer or "",
            arm.run.name,
        ),
    )


def _heading(setup: Setup, arms: Sequence[ArmUnits]) -> str:
    budget = "none" if setup.token_budget is None else f"{setup.token_budget} tokens"
    settings = ", ".join(f"{key} {value}" for key, value in sorted(setup.model_settings.items()))
    places = sorted({place for arm in arms for place in arm.windows})
    conversations = sorted({conversation for conversation, _ in places})
    seeds = sorted({seed for arm in arms for seed in arm.seeds})
    return (
        f"# Study {setup.study}\n\n"
        f"- data: SHA-256 {setup.data_sha256}; split: {setup.part} ({', '.join(conversations)}); "
        f"{len(places)} windows; categories {', '.join(map(str, setup.categories))}\n"
        f"- model: {setup.model} ({settings}); embedder: {setup.embedder}\n"
        f"- retrieval: k = {setup.k}, token budget: {budget}, the same for all arms\n"
        f"- seeds: {', '.join(map(str, seeds)) or 'nothing differs by seed'}\n"
        "- official F1 is `locomo_f1`, paper F1 that of the A-MEM paper; percent; in brackets 95 % "
        "intervals, paired bootstrap over windows within conversations, over whole conversations "
        f"from {CLUSTERS_FROM} on; fewer than {FEW_QUESTIONS} questions or {FEW_CLUSTERS} windows "
        "are never called significant"
    )


_ARM_HEAD = (
    *("arm", "windows", "n", "official F1, micro", "macro", "paper F1, micro", "macro"),
    *(
        "evidence recall",
        "refused",
        "words",
        "tokens shown",
        "failed",
        "calls a question, cached ones not counted",
    ),
)


def _arm_cells(arm: ArmUnits) -> _Cells:
    found = {row.label: row for row in rows(arm.questions)}
    micro = found.get("micro 1-4") or found["micro all"]
    macro = found.get("macro 1-4", micro)
    scores = arm.scores
    return (
        arm.run.name,
        str(len(arm.windows)),
        str(micro.n),
        f"{micro.f1:.1f} {_bounds(micro.interval)}",
        f"{macro.f1:.1f} {_bounds(macro.interval)}",
        f"{micro.paper_f1:.1f} {_bounds(micro.paper_interval)}",
        f"{macro.paper_f1:.1f} {_bounds(macro.paper_interval)}",
        "-" if micro.recall is None else f"{micro.recall:.1f}",
        f"{mean([score.refused for score in scores]):.0%}",
        f"{mean([score.answer_words for score in scores]):.1f}",
        f"{mean([score.shown_tokens for score in scores]):.0f}",
        str(sum(score.failed for score in scores)),
        f"{mean([score.calls for score in scores]):.1f}",
    )


def _incomplete(arms: Sequence[ArmUnits]) -> str:
    if all(arm.windows == arms[0].windows for arm in arms):
        return ""
    return (
        "The arms have not the same windows yet, so these means do not compare; the comparisons "
        "below are made on the questions that both arms have."
    )


def _comparisons(arms: Sequence[ArmUnits]) -> str:
    lines = [
        (arm.run.name, other.run.name, *_comparison_cells(other, arm))
        for arm in arms
        for other in _references(arm, arms)
        if {q.question_id for q in arm.questions} & {q.question_id for q in other.questions}
    ]
    head = ("arm", "against", "n", "means", "change, points", "ratio", "verdict on the change")
    return _table(head, lines) if lines else "There is no untuned arm or control to compare with."


def _references(arm: ArmUnits, arms: Sequence[ArmUnits]) -> Iterator[ArmUnits]:
    """Yield what an arm is compared with: the untuned, and plain retrieval with its answerer."""
    for other in arms:
        run, own = other.run, arm.run
        untuned = not run.raw and run.memory is None and run.answerer is None
        control = run.raw and not own.raw and run.answerer_prompts == own.answerer_prompts
        if run.name != own.name and (untuned or control):
            yield other


def _comparison_cells(before: ArmUnits, after: ArmUnits) -> _Cells:
    made: Comparison = compare(before.questions, after.questions)
    low, high = made.interval
    ratio = f"{made.ratio:.2f} {_bounds(made.ratio_interval, digits=2)}"
    return (
        str(made.n),
        f"{made.before:.1f} to {made.after:.1f}",
        f"{made.change:+.1f} [{low:+.1f}, {high:+.1f}]",
        ratio if math.isfinite(made.ratio) else "-",
        made.verdict,
    )


def _category_table(arms: Sequence[ArmUnits]) -> str:
    found = {arm.run.name: {row.label: row for row in rows(arm.questions)} for arm in arms}
    labels = [f"{number} {name}" for number, name in CATEGORY_NAMES.items()]
    kept = [label for label in labels if any(label in own for own in found.values())]
    lines = [
        (name, *(_row_cell(own[label]) if label in own else "-" for label in kept))
        for name, own in found.items()
    ]
    return _table(("arm", *kept), lines)


def _row_cell(row: Row) -> str:
    return f"{row.f1:.1f} / {row.paper_f1:.1f} ({row.n})"


def _conversation_table(arms: Sequence[ArmUnits]) -> str:
    found = {arm.run.name: by_conversation(arm.questions) for arm in arms}
    names = sorted({name for own in found.values() for name in own})
    lines = [
        (arm, *(_own_cell(own[name]) if name in own else "-" for name in names))
        for arm, own in found.items()
    ]
    return _table(("arm", *names), lines)


def _own_cell(own: Mapping[str, float]) -> str:
    return f"{own['locomo_f1']:.1f} / {own['paper_f1']:.1f} ({own['n']})"


def _seed_section(arms: Sequence[ArmUnits]) -> str:
    several = [arm for arm in arms if len(arm.seeds) > 1]
    if not several:
        return ""
    lines = [
        (arm.run.name, str(seed), *_seed_cells([u for u in arm.units if u.head.arm.seed == seed]))
        for arm in several
        for seed in arm.seeds
    ]
    head = ("arm", "seed", "n", "official F1", "paper F1")
    return f"## By seed, percent\n\n{_table(head, lines)}"


def _seed_cells(units: Sequence[Unit]) -> _Cells:
    scores = [score for unit in units for score in unit.scores]
    official, paper = ([s.locomo_f1 for s in scores], [s.paper["f1"] for s in scores])
    return str(len(scores)), f"{100 * mean(official):.1f}", f"{100 * mean(paper):.1f}"


_COST_HEAD = (
    *("arm", "memory program", "answerer program", "notes", "pending", "links a note"),
    *("calls", "from cache", "tokens", "minutes to write", "minutes to answer"),
)


def _cost_cells(arm: ArmUnits) -> _Cells:
    costs = [unit.head.memory for unit in arm.units]
    notes = sum(cost.notes for cost in costs)
    return (
        arm.run.name,
        "raw turns" if arm.run.raw else arm.run.memory or "untuned",
        arm.run.answerer or "untuned",
        str(notes),
        str(sum(cost.pending for cost in costs)),
        f"{sum(cost.links for cost in costs) / max(1, notes):.1f}",
        str(sum(cost.calls for cost in costs)),
        str(sum(cost.cached for cost in costs)),
        str(sum(cost.tokens for cost in costs)),
        f"{sum(cost.seconds for cost in costs) / 60:.1f}",
        f"{sum(score.seconds for score in arm.scores) / 60:.1f}",
    )


def _bounds(interval: tuple[float, float], *, digits: int = 1) -> str:
    return f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def _table(head: _Cells, lines: Iterable[_Cells]) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
