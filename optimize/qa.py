"""The program that is optimised: build the memory of a conversation, retrieve, answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

import dspy

from amem_dspy.adapter import ExtractionError
from amem_dspy.embedder import Embedder
from amem_dspy.errors import InvalidInputError
from amem_dspy.note import Hit, Note
from amem_dspy.optimize.build import Build, MemoryBuilds, sources
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.optimize.feedback import Written, step_feedback
from amem_dspy.optimize.ledger import Ledger
from amem_dspy.optimize.tuning import is_refusal, refusal_cost, tuning_score
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.program import MemoryProgram
from amem_dspy.render import answer_context

__all__ = [
    "ConversationQA",
    "evidence_recall",
    "is_refusal",
    "qa_examples",
    "qa_metric",
    "tuning_score",
]


class ConversationQA(dspy.Module):
    """Answers questions about conversations from the memory that its own program writes.

    The memory of a conversation is built once for each write path and shared by its questions. The
    trace of a question holds, besides the calls of its own, the write-path calls of the notes that
    were retrieved for it, so that a teleprompter can turn them into demos; the note that ranks
    first comes last, where DSPy's bootstrap picks most often.

    Args:
        memory: The program to optimise; None for an untuned one.
        embedder: As in `AgenticMemory`.
        policy: As in `AgenticMemory`.
        cache: Folder that keeps built memories across runs; None for a temporary one.
        k: Notes retrieved for an answer.
        token_budget: Most tokens of the notes shown to the answerer, or None.
        builds: Shared builds, in place of embedder, policy and cache.
        only: Names of the predictors to tune; the others are frozen: no optimiser sees them. None
            for all.
        ledger: Where the states that answer are entered; an error then ends the whole search.

    Raises:
        InvalidInputError: `only` names none of the predictors, or what is none.
    """

    def __init__(
        self,
        memory: MemoryProgram | None = None,
        *,
        embedder: str | Embedder | None = None,
        policy: EvolutionPolicy | None = None,
        cache: str | PathLike[str] | None = None,
        k: int = 10,
        token_budget: int | None = None,
        builds: MemoryBuilds | None = None,
        only: Sequence[str] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__()
        self.memory = memory or MemoryProgram()
        self.only = None if only is None else _predictor_names(only)
        self.ledger = ledger
        self.builds = builds or MemoryBuilds(embedder=embedder, policy=policy, cache=cache)
        self.k = k
        self.token_budget = token_budget

    def with_memory(self, memory: MemoryProgram) -> ConversationQA:
        """Return the same for another memory program."""
        return ConversationQA(
            memory,
            builds=self.builds,
            k=self.k,
            token_budget=self.token_budget,
            only=self.only,
            ledger=self.ledger,
        )

    def named_parameters(self) -> list[tuple[str, Any]]:
        """Return the predictors that may be tuned, with their names: all that optimisers see."""
        named = super().named_parameters()
        return [
            (name, one)
            for name, one in named
            if self.only is None or name.rpartition(".")[2] in self.only
        ]

    def forward(self, conversation: Conversation, question: str) -> dspy.Prediction:
        """Answer one question.

        Returns:
            A prediction with `answer` (str, "" where no reply validated), `query` (str),
            `retrieved` (turn ids, best first), `shown_share` (of all notes, in [0, 1]),
            `shown_tokens` (of their text, by the embedder's tokenizer) and `failed` (bool).

        Raises:
            ModelError: The model could not be reached or refused; never scored as an answer.
            BudgetSpentError: The budget of calls is spent.
            SearchStopped: In place of any error, where there is a ledger.
        """
        key = self.ledger.enter(self.memory) if self.ledger else None
        try:
            made = self._answer(conversation, question)
        except Exception as error:
            self.builds.failure = error
            if self.ledger:
                raise self.ledger.stop(error) from error
            raise
        # Names that begin with an underscore are no outputs: nothing shows them to a model.
        made._program, made._sampled = key, self._is_sampled()
        return made

    def _is_sampled(self) -> bool:
        """Return whether the predictors have models that SIMBA made to sample."""
        models = [predictor.lm for predictor in self.predictors()]
        return any("rollout_id" in model.kwargs for model in models if model is not None)

    def _answer(self, conversation: Conversation, question: str) -> dspy.Prediction:
        build = self.builds.get(self.memory, conversation)
        with self.builds.open(self.memory, build) as memory:
            try:
                asked = memory.ask(question, k=self.k, token_budget=self.token_budget)
            except ExtractionError:
                return dspy.Prediction(
                    answer="", query="", retrieved=[], shown_share=0.0, shown_tokens=0, failed=True
                )
            self._replay(build, asked.notes)
            made = dspy.Prediction(
                answer=asked.answer,
                query=asked.query,
                retrieved=sources([hit.note for hit in asked.notes]),
                shown_share=len(asked.notes) / max(1, memory.count()),
                shown_tokens=self._shown_tokens([hit.note for hit in asked.notes]),
                failed=False,
            )
            made._written = Written(self.builds, build, self.k, self.token_budget)
            return made

    def _shown_tokens(self, notes: Sequence[Note]) -> int:
        shown = answer_context(notes, context=self.token_budget is None)
        return self.builds.embedder.count_tokens(shown)

    def _replay(self, build: Build, hits: Sequence[Hit]) -> None:
        trace = dspy.settings.trace
        if trace is None:
            return
        for hit in reversed(hits):
            for call in build.calls_for(hit.note):
                # DSPy finds the predictor of a step by identity: it must be this copy's own.
                predictor = getattr(self.memory, call.step)
                outputs = dspy.Prediction(**call.outputs)
                outputs._turn = next(iter(sources([hit.note])), None)
                trace.append((predictor, dict(call.inputs), outputs))


def qa_examples(
    conversations: Iterable[Conversation], *, categories: Sequence[int] = (1, 2, 3, 4)
) -> list[dspy.Example]:
    """Return the questions of these categories as DSPy examples.

    Inputs are `conversation` and `question`; `answer`, `category`, `evidence`, `question_id` and
    `refusal_cost` (see `tuning_score`) are for the metric alone and never reach a prompt.
    """
    asked = [
        (conversation, question)
        for conversation in conversations
        for question in conversation.questions
        if question.category in categories
    ]
    cost = refusal_cost(question.category for _, question in asked)
    return [
        dspy.Example(
            conversation=conversation,
            question=question.question,
            answer=question.answer,
            category=question.category,
            evidence=question.evidence,
            question_id=question.id,
            refusal_cost=cost,
        ).with_inputs("conversation", "question")
        for conversation, question in asked
    ]


def qa_metric(
    example: dspy.Example,
    prediction: dspy.Prediction,
    trace: Any = None,
    pred_name: str | None = None,
    pred_trace: Any = None,
) -> float | dspy.Prediction:
    """Return the tuning score of a prediction: the official F1, guarded; at most 1.

    F1 is no truth value: give bootstrap optimisers a `metric_threshold`, or an answer that is half
    wrong becomes a demo. They also hand in the `trace` that demos are taken from: the calls of
    notes that were shown without being evidence go out of it, for they served no answer.

    For a predictor named in `pred_name`, as GEPA asks, it is a prediction with `score` and with
    `feedback` on what that predictor had to do with it.
    """
    score = tuning_score(example, prediction)
    if pred_name is not None:
        step = pred_name.rpartition(".")[2]
        told = step_feedback(example, prediction, step, score)
        return dspy.Prediction(score=score, feedback=told)
    if trace is not None and example.get("evidence"):
        trace[:] = [call for call in trace if _served(call, example.evidence)]
    return score


def _served(call: tuple[Any, Any, Any], evidence: Sequence[str]) -> bool:
    """Return whether a call is the question's own or wrote a note that is evidence."""
    turn = vars(call[2]).get("_turn")
    return turn is None or turn in evidence


def _predictor_names(names: Sequence[str]) -> tuple[str, ...]:
    known = [name for name, _ in MemoryProgram().named_predictors()]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        said = f"{wrong[0]!r} is no predictor" if wrong else "no predictor is named"
        raise InvalidInputError(f"{said}; the predictors are {', '.join(known)}")
    return tuple(name for name in known if name in names)


def evidence_recall(retrieved: Iterable[str], evidence: Sequence[str]) -> float | None:
    """Return the share of the evidence turns among the retrieved ones; None without evidence."""
    if not evidence:
        return None
    return len(set(evidence) & set(retrieved)) / len(set(evidence))
