"""Runs the model calls of a memory: one after the other, together in threads, or awaited."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dspy

from amem_dspy.adapter import ExtractionError, Scope, extraction_scope
from amem_dspy.errors import AmemError
from amem_dspy.ingest import Call, Outcome, Outcomes, Path, Round
from amem_dspy.model_error import model_errors
from amem_dspy.note import Note
from amem_dspy.offload import offload, together
from amem_dspy.program import MemoryProgram
from amem_dspy.retry import Retry
from amem_dspy.signatures.borrowed import example_words
from amem_dspy.usage import Meter

_log = logging.getLogger(__name__)

MAX_PARALLEL_CALLS = 16
StepListener = Callable[[str, str, Mapping[str, Any], Mapping[str, Any]], None]


class StepRunner:
    """Calls the predictors of a program.

    Attributes:
        program: Whose predictors.
        lm: Returns the model for the next call.
        meter: Counts calls and tokens.
        retry: How a request is made again after an error that may pass.
        listener: Called with note id, step, inputs and outputs of each call that validated.
    """

    def __init__(
        self,
        program: MemoryProgram,
        *,
        lm: Callable[[], dspy.BaseLM],
        meter: Meter,
        retry: Retry | None = None,
    ) -> None:
        self.program = program
        self.lm = lm
        self.meter = meter
        self.retry = retry or Retry()
        self.listener: StepListener | None = None

    def drive(self, path: Path) -> list[Note]:
        """Run a write path to its end; return the notes it stored."""
        asked = _advance(path, None)
        while isinstance(asked, Round):
            asked = _advance(path, self._together(asked))
        return asked.notes

    async def adrive(self, path: Path) -> list[Note]:
        """Do what `drive` does without blocking the event loop.

        Cancelled, it finishes the disk step under way and makes no further call: the notes of the
        path are stored whole or not at all.
        """
        asked = await offload(_advance, path, None)
        while isinstance(asked, Round):
            outcomes = await self._atogether(asked)
            asked = await offload(_advance, path, outcomes)
        return asked.notes

    def _together(self, asked: Round) -> Outcomes:
        calls, beside = asked.calls, asked.beside
        if len(calls) == 1 and beside is None:
            return [self.outcome(calls[0])]
        make = self.outcome if beside is None else self._outcome_ahead
        with ThreadPoolExecutor(min(len(calls), MAX_PARALLEL_CALLS)) as pool:
            # DSPy's settings live in context variables, which threads do not inherit.
            running = [pool.submit(contextvars.copy_context().run, make, call) for call in calls]
            try:
                if beside is not None:
                    beside()
                return [future.result() for future in running]
            finally:
                # After an error those that wait for a thread are not begun.
                pool.shutdown(wait=False, cancel_futures=True)

    async def _atogether(self, asked: Round) -> Outcomes:
        if asked.beside is None:
            return [*await together([self.aoutcome(call) for call in asked.calls])]
        made = [self._aoutcome_ahead(call) for call in asked.calls]
        return (await together([*made, offload(asked.beside)]))[:-1]

    def _outcome_ahead(self, call: Call) -> Outcome | None:
        try:
            return self.outcome(call)
        except AmemError as error:
            _log.debug("%s for note %s is put off: %s", call.step, call.note_id, error)
            return None

    async def _aoutcome_ahead(self, call: Call) -> Outcome | None:
        try:
            return await self.aoutcome(call)
        except AmemError as error:
            _log.debug("%s for note %s is put off: %s", call.step, call.note_id, error)
            return None

    def outcome(self, call: Call) -> Outcome:
        """Make one call; return what validates of its reply.

        Raises:
            ModelError: The model could not be reached or refused.
        """
        with self._extracting(call):
            try:
                made = getattr(self.program, call.step)(**call.inputs)
            except ExtractionError as error:
                return Outcome(error.salvaged, error)
        return self._heard(call, made)

    async def aoutcome(self, call: Call) -> Outcome:
        """Do what `outcome` does, awaiting the model."""
        with self._extracting(call):
            try:
                made = await getattr(self.program, call.step).acall(**call.inputs)
            except ExtractionError as error:
                return Outcome(error.salvaged, error)
        return self._heard(call, made)

    @contextmanager
    def _extracting(self, call: Call) -> Iterator[None]:
        # A model set on the predictor wins, as in DSPy; then none needs to be found for it.
        lm = getattr(self.program, call.step).lm or self.lm()
        if call.fresh:
            # The reply that did not validate may lie in DSPy's cache.
            lm = lm.copy(cache=False)
        demos = getattr(self.program, call.step).demos
        bounds = {**call.bounds, "examples": example_words(demos, call.inputs)}
        scope = Scope(bounds=bounds, step=call.step, meter=self.meter, retry=self.retry)
        with model_errors(lm, call.step), dspy.context(lm=lm), extraction_scope(scope):
            yield

    def _heard(self, call: Call, made: dspy.Prediction) -> Outcome:
        values = dict(made.items())
        if self.listener is not None:
            self.listener(call.note_id, call.step, call.inputs, values)
        return Outcome(values)


@dataclass(frozen=True)
class _Finished:
    notes: list[Note]


def _advance(path: Path, outcomes: Outcomes | None) -> Round | _Finished:
    """Run the write path to its next calls; a StopIteration could not leave a worker thread."""
    try:
        return next(path) if outcomes is None else path.send(outcomes)
    except StopIteration as stop:
        return _Finished(stop.value)
