"""A compile from the command line: estimate, search, save, before and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy

from amem_dspy.cli.bench import seconds_text
from amem_dspy.cli.report import comparison
from amem_dspy.errors import BudgetSpentError
from amem_dspy.optimize.compile import (
    Candidate,
    CompileOptions,
    Search,
    compile_program,
    provenance,
)
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.optimize.estimate import estimate
from amem_dspy.optimize.evaluation import Evaluation, evaluate
from amem_dspy.optimize.journal import Journal
from amem_dspy.optimize.ledger import state_key
from amem_dspy.optimize.qa import ConversationQA, qa_examples
from amem_dspy.optimize.split import Split
from amem_dspy.program import MemoryProgram, resolve_program

Say = Callable[[str], None]


@dataclass(frozen=True)
class Study:
    """What a compile works on and with.

    Attributes:
        teacher: A program's file, or its name.
        teacher_lm: The model that makes demos.
        reflection_lm: The model that proposes instructions.
        journal: Of a run that can be resumed.
    """

    qa: ConversationQA
    split: Split
    options: CompileOptions
    data_hash: str
    teacher: str | None = None
    teacher_lm: dspy.BaseLM | None = None
    reflection_lm: dspy.BaseLM | None = None
    journal: Journal | None = None

    @property
    def replayed(self) -> int:
        """Replies that an earlier start of the run had paid for."""
        return self.journal.replayed if self.journal else 0


@dataclass(frozen=True)
class Result:
    """What a compile found.

    Attributes:
        scores: By part ("dev", "test"): before, after and their difference.
        saved: Whether a program was written.
    """

    search: Search
    scores: dict[str, Any]
    seconds: float
    saved: bool


def estimate_line(study: Study) -> str:
    """Return what the search will cost at most."""
    return next(estimate(study.qa, study.split, study.options).lines())


def questions(part: tuple[Conversation, ...], options: CompileOptions) -> int:
    """Return how many questions of the categories a part holds."""
    return len(qa_examples(part, categories=options.categories))


def run(study: Study, out: Path, say: Say) -> Result:
    """Search, save the best program, and score it and the untuned one.

    Args:
        study: What to work on; a model must be in DSPy's context.
        out: The program's file; written when the search ends and again with the scores.
        say: Gets lines of progress.

    Raises:
        ModelError: The model failed; nothing is saved.
    """
    started = time.perf_counter()
    search = compile_program(
        study.qa,
        study.split,
        study.options,
        teacher=resolve_program(study.teacher) if study.teacher else None,
        teacher_lm=study.teacher_lm,
        reflection_lm=study.reflection_lm,
        on_candidate=_teller(study, say),
    )
    found: dict[str, Any] = {}
    if search.candidates:
        _save(study, search, out, found)
        say(_saved_line(search, out))
        _score(study, search, found, say)
        _save(study, search, out, found)
    return Result(search, found, time.perf_counter() - started, bool(search.candidates))


def candidate_line(candidate: Candidate) -> str:
    """Return what a candidate scored and cost."""
    demos, written = sum(candidate.demos.values()), len(candidate.instructions)
    instructions = f", {written} new instructions" if written else ""
    return (
        f"{candidate.name}: dev F1 {candidate.f1:.1f}, {demos} demos{instructions}, "
        f"{candidate.calls} calls, {seconds_text(candidate.seconds)}"
    )


def _teller(study: Study, say: Say) -> Callable[[Candidate, Search], None]:
    expected = estimate(study.qa, study.split, study.options).candidates

    def tell(candidate: Candidate, search: Search) -> None:
        left = max(0, (expected or 0) - len(search.candidates))
        spent = sum(one.seconds for one in search.candidates) / len(search.candidates)
        rest = f"; at most {left} left, about {seconds_text(spent * left)}" if left else ""
        say(f"{candidate_line(candidate)} (best {search.best_score:.1f}){rest}")

    return tell


def _saved_line(search: Search, out: Path) -> str:
    early = f"; the search ended early: {search.stopped}" if search.stopped else ""
    return f"saved the best program in {out}{early}"


def _save(study: Study, search: Search, out: Path, found: dict[str, Any]) -> None:
    program = search.best.deepcopy()
    made = provenance(study.qa, study.split, study.options, search, data_hash=study.data_hash)
    made["teacher"] = study.teacher
    made["teacher_model"] = study.teacher_lm and study.teacher_lm.model
    made["reflection_model"] = study.reflection_lm and study.reflection_lm.model
    program.provenance = {**made, "seed": study.options.seed, "scores": found}
    # Another name first: a stop in the middle must not leave half a program.
    work = out.with_name(f".{out.stem}.part.json")
    program.save(work)
    work.replace(out)


def _score(study: Study, search: Search, found: dict[str, Any], say: Say) -> None:
    """Put before and after into `found`, dev first, as far as the budget goes."""
    tuned = state_key(search.best) != state_key(study.qa.memory)
    if not tuned:
        say(_untuned_line(search))
    try:
        for name, part in (("dev", study.split.dev), ("test", study.split.test)):
            if part and questions(part, study.options) and search.stopped is None:
                say(f"scoring before and after on {name}")
                before = _evaluated(study, study.qa.memory, part)
                after = _evaluated(study, search.best, part) if tuned else before
                found[name] = comparison(before, after)
    except BudgetSpentError as error:
        search.stopped = str(error)
    except KeyboardInterrupt:
        search.stopped = "interrupted"
    if "dev" not in found:
        found["dev"] = _dev_means(study, search)


def _untuned_line(search: Search) -> str:
    if len(search.candidates) > 1 and not any(sum(c.demos.values()) for c in search.candidates):
        return (
            "no answer on the training part was right enough to learn from, so the untuned program "
            "was saved; a lower --threshold, more questions or a better model would help"
        )
    return "no candidate was better on dev than the program at the start, which is what was saved"


def _dev_means(study: Study, search: Search) -> dict[str, Any]:
    """Return the means that the search itself measured, without intervals."""
    n = questions(study.split.dev, study.options)
    before = {"n": n, "locomo_f1": search.candidates[0].f1}
    return {"before": before, "after": {"n": n, "locomo_f1": search.best_score}}


def _evaluated(study: Study, program: MemoryProgram, part: tuple[Conversation, ...]) -> Evaluation:
    qa = ConversationQA(
        program, builds=study.qa.builds, k=study.qa.k, token_budget=study.qa.token_budget
    )
    options = study.options
    return evaluate(qa, part, categories=options.categories, threads=options.threads)
