"""An evaluation from the command line: manifest, records as they come, summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dspy

from amem_dspy.cli.output import Bars
from amem_dspy.cli.report import usage_data
from amem_dspy.errors import DataError, InvalidInputError
from amem_dspy.optimize.control import ANSWER_STEPS, prompts_hash
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.optimize.evaluation import Evaluation, QuestionRecord, evaluate
from amem_dspy.optimize.qa import ConversationQA, qa_examples
from amem_dspy.optimize.remembered import WRITE_STEPS

COST = ("calls", "tokens", "seconds")
PACKAGES = ("amem-dspy", "dspy", "instructor", "lancedb")


@dataclass(frozen=True)
class Plan:
    """What to evaluate, on what.

    Attributes:
        data_hash: SHA-256 of the data file.
        limit: Most questions a conversation.
        window_seed: What drew the windows.
    """

    qa: ConversationQA
    conversations: Sequence[Conversation]
    categories: tuple[int, ...]
    limit: int | None
    threads: int
    data_hash: str
    window_seed: int = 0

    def manifest(self) -> dict[str, Any]:
        """Return all that the result depends on; the same inputs give the same manifest."""
        lm, builds = dspy.settings.lm, self.qa.builds
        return {
            "data_sha256": self.data_hash,
            "prompts": {
                "memory": prompts_hash(self.qa.memory, WRITE_STEPS),
                "answerer": prompts_hash(self.qa.memory, ANSWER_STEPS),
            },
            "window_seed": self.window_seed,
            "conversations": [f"{c.id} {c.span}" for c in self.conversations],
            "categories": list(self.categories),
            "limit": self.limit,
            "model": lm.model,
            "model_settings": {k: lm.kwargs.get(k) for k in ("temperature", "max_tokens")},
            "embedder": builds.embedder.id,
            "policy": builds.policy.values(),
            "wave": builds.wave,
            "k": self.qa.k,
            "token_budget": self.qa.token_budget,
            "interval_seed": 0,
            "versions": {name: version(name) for name in PACKAGES},
        }

    def questions(self) -> int:
        """Return how many questions will be asked."""
        counts = [len(qa_examples([c], categories=self.categories)) for c in self.conversations]
        return sum(count if self.limit is None else min(count, self.limit) for count in counts)


def run(plan: Plan, out: Path, bars: Bars) -> tuple[Evaluation, dict[str, Any]]:
    """Evaluate, and write manifest.json, records.jsonl, summary.json and cost.json in `out`.

    The same inputs give the same bytes, but for cost.json, which holds times and what the cache
    answered.

    Raises:
        DataError: There is no question to ask.
        InvalidInputError: `out` holds the results of something else.
        ModelError: The model is not there.
    """
    total = plan.questions()
    if not total:
        raise DataError("there is no question of these categories in these conversations")
    _write_manifest(out, plan.manifest())
    done = 0
    with (out / "records.jsonl").open("w", encoding="utf-8") as file:

        def write(record: QuestionRecord) -> None:
            nonlocal done
            done += 1
            file.write(record.model_dump_json(exclude=set(COST)) + "\n")
            file.flush()
            bars.update("questions", done, total)

        made = evaluate(
            plan.qa,
            plan.conversations,
            categories=plan.categories,
            limit=plan.limit,
            threads=plan.threads,
            on_record=write,
        )
    _write_json(out / "summary.json", made.summary())
    usage = usage_data(plan.qa.builds.meter.steps())
    questions = {one.question_id: one.model_dump(include=set(COST)) for one in made.records}
    _write_json(out / "cost.json", {"usage": usage, "questions": questions})
    return made, {**made.summary(), "usage": usage}


def _write_manifest(out: Path, manifest: dict[str, Any]) -> None:
    path = out / "manifest.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(key for key in manifest if found.get(key) != manifest[key])
        if changed:
            raise InvalidInputError(
                f"{out} holds results of another run (other {', '.join(changed)}); "
                "give another folder with --out"
            )
    out.mkdir(parents=True, exist_ok=True)
    _write_json(path, manifest)


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
