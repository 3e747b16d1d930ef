"""The narrated run of `amem demo`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy
from rich.console import RenderableType
from rich.text import Text

from amem_dspy.adapter import ExtractionError
from amem_dspy.cli import compiling
from amem_dspy.cli.bench import build_progress, bundled, model_context, seconds_text
from amem_dspy.cli.output import Output, counted, entry, row, show
from amem_dspy.cli.report import comparison_lines, usage_table
from amem_dspy.cli.view import card_lines, linked
from amem_dspy.embedder import Embedder
from amem_dspy.memory import AgenticMemory
from amem_dspy.note import Note
from amem_dspy.optimize.build import MemoryBuilds, sources, turn_items
from amem_dspy.optimize.compile import CompileOptions
from amem_dspy.optimize.conversation import Conversation, window
from amem_dspy.optimize.qa import ConversationQA
from amem_dspy.optimize.split import Split
from amem_dspy.optimize.windows import evidence_windows
from amem_dspy.program import STARTER
from amem_dspy.usage import Meter

ASKED = 3
# Low, so that a small model finds something to learn from at all.
THRESHOLD = 0.1
SHOWN = 3


@dataclass(frozen=True)
class DemoOptions:
    """Sizes of the demo, for ten minutes on two cores with the embedded model.

    Attributes:
        turns: Turns of bundled-1 that are stored, and trained on.
        candidates: Tuned programs that are tried.
        dev_turns: Window of bundled-2 to choose on.
        test_turns: Window of bundled-3 to score on.
    """

    turns: int = 14
    candidates: int = 2
    dev_turns: int = 8
    test_turns: int = 8


class Narrator:
    """Prints the demo where it belongs: stdout, or stderr where JSON is asked for."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self._console = output.err if output.json else output.out

    def __call__(self, *lines: RenderableType) -> None:
        """Print lines."""
        for line in lines:
            show(self._console, line)

    def step(self, title: str) -> None:
        """Begin a part."""
        self("", Text(title, style="bold"))


def run_demo(
    output: Output,
    lm: dspy.BaseLM,
    embedder: Embedder,
    folder: Path,
    options: DemoOptions,
    *,
    kept: bool = False,
) -> dict[str, Any]:
    """Run the demo in a folder; return what it found.

    Args:
        output: Where it is told and where the bars are.
        lm: The language model.
        embedder: The embedder.
        folder: Gets the store, the built memories and the tuned program.
        options: Sizes.
        kept: Whether the folder stays, for the last words.
    """
    say, started = Narrator(output), time.perf_counter()
    (first, second, third), digest = bundled()
    part = window(first, max_turns=options.turns)
    split = Split(
        (part,),
        tuple(evidence_windows(second, turns=options.dev_turns, count=1)),
        tuple(evidence_windows(third, turns=options.test_turns, count=1)),
    )
    _introduce(say, lm, options)
    meter = Meter()
    with AgenticMemory(
        folder / "memory", program=STARTER, lm=lm, embedder=embedder, meter=meter
    ) as memory:
        _store(say, memory, part)
        _show_notes(say, memory)
        answers = _ask(say, memory, part)
    with model_context(lm):
        builds = MemoryBuilds(embedder=embedder, cache=folder / "builds", meter=meter)
        settings = CompileOptions(candidates=options.candidates - 1, threshold=THRESHOLD)
        qa = ConversationQA(builds=builds, k=5)
        study = compiling.Study(qa, split, settings, digest, teacher=STARTER)
        result = _tune(say, study, folder / "tuned.json")
    _compare(say, result)
    say.step("7. What it cost")
    say(usage_table(meter.steps()), f"{seconds_text(time.perf_counter() - started)} in all")
    _next_steps(say, folder if kept else None)
    return {"answers": answers, "scores": result.scores, "kept": str(folder) if kept else None}


def _introduce(say: Narrator, lm: dspy.BaseLM, options: DemoOptions) -> None:
    say.step("1. What will happen")
    say(
        f"{options.turns} turns of a small conversation become notes that link and update each "
        "other; three questions are answered from them; then the prompts of all steps are tuned on "
        "other conversations, and F1 is measured before and after on questions not used so far."
    )
    say(f"Model: {row((lm.model, '')).plain}. Ctrl-C stops it.")
    if lm.model.startswith("embedded/"):
        say(
            "On two cores this takes 5 to 10 minutes. The model has 135 million parameters and "
            "writes poor notes and answers: it shows how things work, not how well they can."
        )


def _store(say: Narrator, memory: AgenticMemory, part: Conversation) -> None:
    say.step(f"2. Storing {len(part.turns)} turns")
    total, done = len(part.turns), 0
    with say.output.bars() as bars:
        bars.update("storing", 0, total)

        def stored(note: Note) -> None:
            nonlocal done
            done += 1
            bars.update("storing", done, total)
            say(_stored_line(note))

        memory.add_many(turn_items(part), wave=1, progress=stored)


def _stored_line(note: Note) -> Text:
    turn = sources([note])[0] if note.source else ""
    links = counted(len(note.links), "link") if note.links else "no link"
    pending = [("[pending: no valid reply]", "yellow")] if note.pending else []
    reason = [(note.links[0].reason, "italic")] if note.links else []
    return row((turn, "cyan"), (note.content[:50], ""), (links, "green"), *pending, *reason)


def _show_notes(say: Narrator, memory: AgenticMemory) -> None:
    say.step(f"3. {SHOWN} notes with their cards")
    notes = memory.all()
    # Stable: of notes with as many links, the earliest.
    for note in sorted(notes, key=lambda note: -len(note.links))[:SHOWN]:
        say(*card_lines(note, say.output, linked(memory, note)), "")
    change = _evolution(notes)
    if change is None:
        say("No stored note was rewritten by a later one this time.")
        return
    note, before, after, cause = change
    say(Text("One note that a later note changed:", style="bold"), entry("note", note.content))
    say(entry("because of", cause.content))
    say(entry("context before", before or "(none)"), entry("context after", after or "(none)"))


def _evolution(notes: Sequence[Note]) -> tuple[Note, str, str, Note] | None:
    """Return a note whose context a later note changed, before, after, and the later note."""
    by_id = {note.id: note for note in notes}
    for note in notes:
        contexts = [*(state.context for state in note.history), note.context]
        for before, after in zip(note.history, contexts[1:], strict=True):
            cause = by_id.get(before.by or "")
            if before.cause == "evolution" and cause and before.context != after:
                return note, before.context, after, cause
    return None


def _ask(say: Narrator, memory: AgenticMemory, part: Conversation) -> list[dict[str, Any]]:
    asked = [question for question in part.questions if question.category != 5][:ASKED]
    say.step(f"4. {len(asked)} questions")
    answers = []
    for question in asked:
        try:
            made = memory.ask(question.question, k=5)
            answer, used = made.answer, sources([hit.note for hit in made.notes])
        except ExtractionError:
            answer, used = "(no valid reply)", []
        say(entry("question", question.question), entry("  answer", answer))
        say(entry("  right", question.answer or ""), entry("  from turns", ", ".join(used)))
        answers.append({"question": question.id, "answer": answer, "gold": question.answer})
    return answers


def _tune(say: Narrator, study: compiling.Study, out: Path) -> compiling.Result:
    say.step("5. Tuning the prompts")
    say(
        "Calls that led to right answers on one conversation become examples in the prompts; each "
        "candidate is scored by official F1 on a second conversation (dev).",
        compiling.estimate_line(study),
    )
    with say.output.bars() as bars:
        study.qa.builds.progress = build_progress(bars)
        return compiling.run(study, out, say)


def _compare(say: Narrator, result: compiling.Result) -> None:
    say.step("6. Before and after, on a third conversation (test)")
    if "test" not in result.scores:
        say(f"The search ended early ({result.search.stopped}); there are no test scores.")
        return
    say(*comparison_lines("test", result.scores["test"]))


def _next_steps(say: Narrator, kept: Path | None) -> None:
    say.step("Next")
    program = f" --program {row((str(kept / 'tuned.json'), '')).plain}" if kept else ""
    say(
        '  amem add "I run 10 km every weekend."',
        f'  amem ask "What do I do on weekends?"{program}',
        "  amem compile --data locomo10.json --out tuned.json --lm openai/gpt-4o-mini",
    )
    if kept is None:
        say("(--keep DIR keeps the notes and the tuned program of this demo.)")
