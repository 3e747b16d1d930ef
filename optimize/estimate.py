"""What a compile will cost, before it starts: bounds from above, by optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from amem_dspy.adapter import InstructorAdapter
from amem_dspy.optimize.compile import CompileOptions
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.optimize.journal import Rate
from amem_dspy.optimize.optimizer import optimizer_named
from amem_dspy.optimize.qa import ConversationQA, qa_examples
from amem_dspy.optimize.remembered import WRITE_STEPS
from amem_dspy.optimize.split import Split
from amem_dspy.usage import Price

# A note costs construct, links and, where something changes, updates; a question costs rewrite
# and answer. A proposal of an instruction is one call, or a few where it is asked for again.
CALLS_A_NOTE = 3
# To see whether the model is there.
CALLS_BEFORE = 3
CALLS_A_QUESTION = 2
_BYTES_A_TOKEN = 4
_REPLY_TOKENS = 60
_SCHEMA_TOKENS = 150
_PROPOSAL_TOKENS = (3000, 400)
_GEPA_MINIBATCH = 3
_AUTO = {"light": 6, "medium": 12, "heavy": 18}

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """The size of a part of the split: questions, notes."""

    questions: int
    notes: int

    @classmethod
    def of(cls, conversations: tuple[Conversation, ...], categories: tuple[int, ...]) -> Part:
        """Return the size of these conversations."""
        notes = sum(len(one.turns) for one in conversations)
        return cls(len(qa_examples(conversations, categories=categories)), notes)


@dataclass(frozen=True)
class Work:
    """What an optimiser does at most, besides scoring the untuned program.

    Attributes:
        dev: Programs scored on all dev questions.
        train: Programs that answer all train questions.
        asked: Further questions, answered by programs of their own.
        proposals: Calls that propose instructions.
        writers: How many of the train programs write notes of their own.
        counted: Whether the number of programs on dev is known before.
    """

    dev: int = 0
    train: int = 0
    asked: int = 0
    proposals: int = 0
    writers: int = 1
    counted: bool = True

    def __add__(self, other: Work) -> Work:
        return Work(
            self.dev + other.dev,
            self.train + other.train,
            self.asked + other.asked,
            self.proposals + other.proposals,
            self.writers + other.writers,
            self.counted and other.counted,
        )


@dataclass(frozen=True)
class Estimate:
    """What a compile costs at most; what a cache answers costs nothing.

    Attributes:
        optimizer: Its name.
        candidates: Programs compared on dev, the untuned one among them; None where as many are
            as the other numbers allow.
        notes: Notes to write.
        questions: Questions to answer.
        proposals: Calls that propose instructions; some of DSPy's are not known before.
        calls: Model calls.
        prompt_tokens: Tokens in, about.
        completion_tokens: Tokens out, about.
        cost: USD; None where the price is not known.
        hours: At the measured rate, one call after the other; None where there is none.
        seconds_a_call: That rate.
    """

    optimizer: str
    candidates: int | None
    notes: int
    questions: int
    proposals: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None = None
    hours: float | None = None
    seconds_a_call: float | None = None

    def lines(self) -> Iterator[str]:
        """Yield it for a person."""
        proposed = f", {self.proposals} instructions to propose" if self.proposals else ""
        many = "" if self.candidates is None else f", {self.candidates} candidates"
        yield (
            f"{self.optimizer}{many}; at most {self.notes} notes to write "
            f"and {self.questions} questions to answer{proposed}: up to about {self.calls} model "
            "calls (what is cached costs nothing)"
        )
        tokens = (
            f"up to about {_count(self.prompt_tokens)} tokens in, "
            f"{_count(self.completion_tokens)} out"
        )
        money = "price unknown (--price IN/OUT)" if self.cost is None else f"{self.cost:.2f} USD"
        if self.hours is None or self.seconds_a_call is None:
            yield f"{tokens}; {money}; hours unknown before the first call (--rate)"
        else:
            long = self.hours >= 1
            time = f"{self.hours:.1f} hours" if long else f"{60 * self.hours:.0f} minutes"
            yield f"{tokens}; {money}; {time} at {self.seconds_a_call:.2f} s a call"


def estimate(
    qa: ConversationQA,
    split: Split,
    options: CompileOptions,
    *,
    price: Price | None = None,
    rate: Rate | None = None,
) -> Estimate:
    """Return what a compile will cost at most; no model is asked.

    Raises:
        ConfigError: There is no such optimiser, or it has no such setting.
    """
    optimizer = optimizer_named(options.optimizer)
    train, dev, test = (
        Part.of(part, options.categories) for part in (split.train, split.dev, split.test)
    )
    bounds = {"bounds": _Bounds(train, dev, options), "settings": optimizer.settings(options.knobs)}
    work = _BOUNDS[options.optimizer](**bounds)
    is_raw = not qa.builds.policy.construct
    writes = options.only is None or bool(set(options.only) & set(WRITE_STEPS))
    notes = _notes(work, train, dev, writes=writes) + (2 if writes else 1) * test.notes
    notes *= not is_raw
    asked = (work.dev + 1) * dev.questions + work.train * train.questions + work.asked
    # Before and after are scored at the end, dev again where there is no cache.
    questions = asked + 2 * (dev.questions + test.questions)
    calls = CALLS_A_NOTE * notes + CALLS_A_QUESTION * questions + work.proposals + CALLS_BEFORE
    tokens_in, tokens_out = _tokens(qa, split, options, notes, questions, work.proposals)
    if rate is not None and rate.completion_tokens:
        tokens_out = math.ceil(calls * rate.completion_tokens / rate.calls)
    return Estimate(
        options.optimizer,
        work.dev + 1 if work.counted else None,
        notes,
        questions,
        work.proposals,
        calls,
        tokens_in,
        tokens_out,
        None if price is None else price.cost(tokens_in, tokens_out),
        None if rate is None else calls * rate.seconds_a_call / 3600,
        None if rate is None else rate.seconds_a_call,
    )


def _notes(work: Work, train: Part, dev: Part, *, writes: bool) -> int:
    on_train = min(1, work.train + work.asked)
    if not writes:
        return dev.notes + on_train * train.notes
    # A question of a program of its own has its window written for it, at most the largest part.
    window = max(train.notes / max(1, train.questions), dev.notes / max(1, dev.questions))
    own = math.ceil(work.asked * window)
    return (work.dev + 1) * dev.notes + on_train * work.writers * train.notes + own


@dataclass(frozen=True)
class _Bounds:
    """What the bounds are made of."""

    train: Part
    dev: Part
    options: CompileOptions

    @property
    def predictors(self) -> int:
        return len(self.options.only or ()) or 5


def _bootstrap(bounds: _Bounds, settings: Settings) -> Work:
    rounds = int(settings.get("max_rounds") or 1)
    return Work(dev=1, train=rounds, writers=rounds)


def _random_search(bounds: _Bounds, settings: Settings) -> Work:
    count = bounds.options.candidates + 1
    return Work(dev=count, train=count)


def _mipro(bounds: _Bounds, settings: Settings) -> Work:
    auto = settings.get("auto")
    count = _AUTO[auto] if auto else int(settings["num_candidates"])
    trials = settings.get("num_trials")
    if auto or trials is None:
        trials = max(4 * bounds.predictors * math.log2(max(2, count)), 1.5 * count)
    # Between proposals DSPy describes the data and the program, in calls of a number of its own.
    proposals = bounds.predictors * count * 2 + 20
    return Work(dev=math.ceil(trials) + 1, train=count, proposals=proposals)


def _gepa(bounds: _Bounds, settings: Settings) -> Work:
    both = bounds.train.questions + bounds.dev.questions
    if settings.get("max_metric_calls"):
        asked = int(settings["max_metric_calls"])
    elif settings.get("auto"):
        import dspy

        asked = dspy.GEPA.auto_budget(
            None, bounds.predictors, _AUTO[settings["auto"]], bounds.dev.questions
        )
    else:
        asked = int(settings.get("max_full_evals") or 1) * both
    batch = int(settings.get("reflection_minibatch_size") or _GEPA_MINIBATCH)
    proposals = math.ceil(asked / (2 * batch))
    return Work(dev=1, asked=asked, proposals=proposals, counted=False)


def _simba(bounds: _Bounds, settings: Settings) -> Work:
    steps, count = int(settings["max_steps"]), int(settings["num_candidates"])
    batch = min(int(settings["bsize"]), bounds.train.questions)
    # Each step samples answers and scores new programs on a batch; the winners go over all of it.
    asked = steps * 2 * count * batch
    final = min(steps, count) + 1
    return Work(steps + 1, final, asked, proposals=steps * count, writers=final)


def _copro(bounds: _Bounds, settings: Settings) -> Work:
    breadth, depth = int(settings["breadth"]), int(settings["depth"])
    # With several predictors DSPy scores what earlier rounds found once more.
    scored = bounds.predictors * breadth * depth * (depth + 1) // 2
    return Work(dev=scored, proposals=bounds.predictors * breadth * depth)


def _knn(bounds: _Bounds, settings: Settings) -> Work:
    return Work(dev=1, train=1)


def _better_together(bounds: _Bounds, settings: Settings) -> Work:
    works = [_BOUNDS[name](bounds, own) for name, own in settings["parts"].items()]
    return sum(works, Work(writers=0))


_BOUNDS: dict[str, Callable[..., Work]] = {
    "bootstrap": _bootstrap,
    "random-search": _random_search,
    "mipro": _mipro,
    "gepa": _gepa,
    "simba": _simba,
    "copro": _copro,
    "knn": _knn,
    "better-together": _better_together,
}


def _tokens(
    qa: ConversationQA,
    split: Split,
    options: CompileOptions,
    notes: int,
    questions: int,
    proposals: int,
) -> tuple[int, int]:
    """Return tokens in and out, by the length of the prompts, every step with all its demos."""
    adapter = InstructorAdapter()
    systems = [
        len(adapter.format_system_message(predictor.signature).encode())
        for _, predictor in qa.memory.named_predictors()
    ]
    fixed = sum(systems) / len(systems) / _BYTES_A_TOKEN + _SCHEMA_TOKENS
    texts = [
        turn.text.encode() for part in (split.train, split.dev) for c in part for turn in c.turns
    ]
    line = sum(map(len, texts)) / max(1, len(texts)) / _BYTES_A_TOKEN + 40
    shown = 1 + options.max_demos
    candidates = qa.builds.policy.k
    note = CALLS_A_NOTE * fixed + shown * line * (1 + 2 * (1 + candidates))
    question = CALLS_A_QUESTION * fixed + shown * line * (1 + qa.k)
    replies = CALLS_A_NOTE * notes + CALLS_A_QUESTION * questions
    return (
        math.ceil(notes * note + questions * question + proposals * _PROPOSAL_TOKENS[0]),
        math.ceil(replies * _REPLY_TOKENS + proposals * _PROPOSAL_TOKENS[1]),
    )


def _count(number: int) -> str:
    if number < 10_000:
        return str(number)
    return f"{number / 1000:.0f} thousand" if number < 10**6 else f"{number / 10**6:.1f} million"
