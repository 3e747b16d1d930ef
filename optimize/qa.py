"""The program that is optimised: build the memory of a conversation, retrieve, answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

import dspy

from amem_dspy.adapter import ExtractionError
from amem_dspy.embedder import Embedder
from amem_dspy.note import Hit
from amem_dspy.optimize.build import Build, MemoryBuilds, sources
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.optimize.score import REFUSAL, locomo_f1
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.program import MemoryProgram


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
    ) -> None:
        super().__init__()
        self.memory = memory or MemoryProgram()
        self.builds = builds or MemoryBuilds(embedder=embedder, policy=policy, cache=cache)
        self.k = k
        self.token_budget = token_budget

    def forward(self, conversation: Conversation, question: str) -> dspy.Prediction:
        """Answer one question.

        Returns:
            A prediction with `answer` (str, "" where no reply validated), `query` (str),
            `retrieved` (turn ids, best first), `shown_share` (of all notes, in [0, 1]) and `failed`
            (bool).

        Raises:
            ModelError: The model could not be reached or refused; never scored as an answer.
            BudgetSpentError: The budget of calls is spent.
        """
        try:
            return self._answer(conversation, question)
        except Exception as error:
            self.builds.failure = error
            raise

    def _answer(self, conversation: Conversation, question: str) -> dspy.Prediction:
        build = self.builds.get(self.memory, conversation)
        with self.builds.open(self.memory, build) as memory:
            try:
                asked = memory.ask(question, k=self.k, token_budget=self.token_budget)
            except ExtractionError:
                return dspy.Prediction(
                    answer="", query="", retrieved=[], shown_share=0.0, failed=True
                )
            self._replay(build, asked.notes)
            return dspy.Prediction(
                answer=asked.answer,
                query=asked.query,
                retrieved=sources([hit.note for hit in asked.notes]),
                shown_share=len(asked.notes) / max(1, memory.count()),
                failed=False,
            )

    def _replay(self, build: Build, hits: Sequence[Hit]) -> None:
        trace = dspy.settings.trace
        if trace is None:
            return
        for hit in reversed(hits):
            for call in build.calls_for(hit.note):
                # DSPy finds the predictor of a step by identity: it must be this copy's own.
                predictor = getattr(self.memory, call.step)
                trace.append((predictor, dict(call.inputs), dspy.Prediction(**call.outputs)))


def qa_examples(
    conversations: Iterable[Conversation], *, categories: Sequence[int] = (1, 2, 3, 4)
) -> list[dspy.Example]:
    """Return the questions of these categories as DSPy examples.

    Inputs are `conversation` and `question`; `answer`, `category`, `evidence` and `question_id` are
    for the metric alone and never reach a prompt.
    """
    return [
        dspy.Example(
            conversation=conversation,
            question=question.question,
            answer=question.answer,
            category=question.category,
            evidence=question.evidence,
            question_id=question.id,
        ).with_inputs("conversation", "question")
        for conversation in conversations
        for question in conversation.questions
        if question.category in categories
    ]


def qa_metric(
    example: dspy.Example,
    prediction: dspy.Prediction,
    trace: Any = None,
    pred_name: str | None = None,
    pred_trace: Any = None,
) -> float | dspy.Prediction:
    """Return the official LoCoMo F1 of a prediction, in [0, 1].

    F1 is no truth value: give bootstrap optimisers a `metric_threshold`, or an answer that is half
    wrong becomes a demo. For a predictor named in `pred_name`, as GEPA asks, it is a prediction
    with `score` and with `feedback` on what that predictor had to do with it.
    """
    score = locomo_f1(prediction.answer, example.answer, example.category)
    if pred_name is None:
        return score
    return dspy.Prediction(score=score, feedback=_feedback(example, prediction, pred_name, score))


def _feedback(
    example: dspy.Example, prediction: dspy.Prediction, pred_name: str, score: float
) -> str:
    """Return what went wrong, told apart by the evidence turns that LoCoMo names."""
    right = REFUSAL if example.category == 5 else example.answer
    missed = [key for key in example.evidence if key not in prediction.retrieved]
    said = f"Question: {example.question} Answer given: {prediction.answer} Right: {right}."
    told = f"{said} F1 {score:.2f}."
    if score == 1 or not example.evidence:
        return told
    answers = pred_name.rsplit(".", 1)[-1] == "answer_question"
    if not missed:
        fault = "this answer is wrong" if answers else "the answer is at fault, not this step"
        return f"{told} The notes with the evidence were all shown: {fault}."
    if answers:
        return f"{told} Notes with the evidence were not shown: not the fault of the answer alone."
    turns = [turn for turn in example.conversation.turns if turn.id in missed]
    lost = " / ".join(f"{turn.speaker}: {turn.text}" for turn in turns)
    return f"{told} These were not found, though they hold the evidence: {lost}"


def evidence_recall(retrieved: Iterable[str], evidence: Sequence[str]) -> float | None:
    """Return the share of the evidence turns among the retrieved ones; None without evidence."""
    if not evidence:
        return None
    return len(set(evidence) & set(retrieved)) / len(set(evidence))
