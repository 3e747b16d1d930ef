"""Evidence recall on LoCoMo: what of a question's evidence is among what the answerer gets.

Stores are built without a model (`EvolutionPolicy.raw()`). Each conversation is one user's store,
each question with evidence one search. Rows of the table: five ways of ranking all turns, computed
here, and the modes of `AgenticMemory.search`. All of them are packed by the same function.

    python benchmarks/recall.py --data locomo10.json             # the table
    python benchmarks/recall.py --data locomo10.json --ablate    # what each ingredient brings
    python benchmarks/recall.py --data locomo10.json --learn     # the weights of amem_dspy.rank
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from amem_dspy import AgenticMemory, EvolutionPolicy, Note, bm25
from amem_dspy.embedder import SentenceTransformerEmbedder
from amem_dspy.feature import CONTENT, FEATURES
from amem_dspy.note import Hit
from amem_dspy.optimize import load_locomo
from amem_dspy.optimize.build import turn_items
from amem_dspy.optimize.locomo import Conversation, Question
from amem_dspy.query import QUESTION_WORDS
from amem_dspy.rank import WEIGHTS, best_first
from amem_dspy.retrieve import Query, Retriever, packed

TRAIN = ("conv-26", "conv-30", "conv-41")
BUDGETS = (500, 1_000, 2_500)
COLUMNS = ("@10", *(f"@{budget} tokens" for budget in BUDGETS))
NOTES = 120
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
RESAMPLES = 2_000
PENALTY = 1e-3

Floats = NDArray[np.float64]
Ranking = Callable[[Question], Sequence[Note]]


class Embedder(SentenceTransformerEmbedder):
    """The default embedder; each text is embedded and counted once in this process."""

    vectors: ClassVar[dict[str, NDArray[np.float32]]] = {}
    counts: ClassVar[dict[str, int]] = {}

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        new = list(dict.fromkeys(text for text in texts if text not in self.vectors))
        self.vectors.update(zip(new, super().embed(new), strict=True))
        return np.stack([self.vectors[text] for text in texts])

    def count_tokens(self, text: str) -> int:
        if text not in self.counts:
            self.counts[text] = super().count_tokens(text)
        return self.counts[text]


@dataclass(frozen=True)
class Study:
    """One conversation, its store and its questions."""

    conversation: Conversation
    memory: AgenticMemory
    notes: list[Note] = field(default_factory=list)

    @property
    def questions(self) -> list[Question]:
        return [question for question in self.conversation.questions if question.evidence]

    def recalls(self, question: Question, ranked: Sequence[Note]) -> list[float]:
        hits = [Hit(note=note, score=0.0) for note in ranked]
        sets = [hits[:10]]
        sets += [packed(hits, budget, self.memory.embedder.count_tokens) for budget in BUDGETS]
        evidence = {f"{self.conversation.id}/{turn}" for turn in question.evidence}
        found = [{hit.note.source for hit in chosen} for chosen in sets]
        return [len(sources & evidence) / len(evidence) for sources in found]


@dataclass
class Scores:
    """Recalls of one row, by question."""

    name: str
    conversations: list[str] = field(default_factory=list)
    categories: list[int] = field(default_factory=list)
    recalls: list[list[float]] = field(default_factory=list)

    def add(self, study: Study, ranking: Ranking) -> None:
        for question in study.questions:
            self.conversations.append(study.conversation.id)
            self.categories.append(question.category)
            self.recalls.append(study.recalls(question, ranking(question)))

    def where(self, *, unseen: bool = False, category: int | None = None) -> Floats:
        chosen = [
            row
            for row, name, kind in zip(
                self.recalls, self.conversations, self.categories, strict=True
            )
            if not (unseen and name in TRAIN) and category in (None, kind)
        ]
        return 100 * np.array(chosen).reshape(-1, len(COLUMNS))


# Ranking all turns


def standing(study: Study, embedder: Embedder) -> dict[str, Ranking]:
    """Return the rankings to compare with, by name; each scores every turn."""
    texts = [note.content for note in study.notes]
    threads = [note.thread for note in study.notes]
    pairs, threes = (windows(texts, threads, size) for size in (2, 3))
    dense = {size: embedder.embed(part) for size, part in ((1, texts), (2, pairs), (3, threes))}
    words = {size: Words(part) for size, part in ((1, texts), (2, pairs), (3, threes))}

    def cosine(question: str, size: int) -> Floats:
        return np.asarray(dense[size] @ embedder.embed([question])[0], np.float64)

    def named(question: str) -> Floats:
        speakers = [text.split(":")[0].casefold() for text in texts]
        return np.array([speaker in question.casefold() for speaker in speakers], float)

    scorers: dict[str, Callable[[str], Floats]] = {
        "dense": lambda q: cosine(q, 1),
        "BM25": lambda q: words[1](q),
        "RRF of both": lambda q: rrf(cosine(q, 1)) + rrf(words[1](q)),
        "RRF of four": lambda q: sum(
            (rrf(cosine(q, size)) + rrf(words[size](q)) for size in (1, 2)), np.zeros(len(texts))
        ),
        "z-scores summed": lambda q: (
            z(cosine(q, 1))
            + z(cosine(q, 2))
            + 0.7 * z(cosine(q, 3))
            + 1.5 * z(words[1](q))
            + 1.5 * z(words[2](q))
            + 0.7 * z(words[3](q))
            + 0.5 * named(q)
        ),
    }

    def ranking(scorer: Callable[[str], Floats]) -> Ranking:
        return lambda question: [
            study.notes[place] for place in np.argsort(-scorer(question.question), kind="stable")
        ][:NOTES]

    return {name: ranking(scorer) for name, scorer in scorers.items()}


def windows(texts: Sequence[str], threads: Sequence[str | None], size: int) -> list[str]:
    """Return each text below those of the `size` - 1 turns before it."""
    return [
        "\n".join(
            texts[at]
            for at in range(max(0, place - size + 1), place + 1)
            if threads[at] == threads[place]
        )
        for place in range(len(texts))
    ]


class Words:
    """BM25 over all texts of a conversation, stemmed, without stop words."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __call__(self, question: str) -> Floats:
        kept = [word for word in question.split() if word.lower() not in QUESTION_WORDS]
        words = tuple(dict.fromkeys(bm25.words(" ".join(kept))))
        counts = bm25.count(words, self.texts, bm25.words)
        return bm25.weigh(words, counts, len(self.texts)).scores(counts)


def rrf(scores: Floats) -> Floats:
    return np.asarray(1.0 / (61 + np.argsort(np.argsort(-scores))))


def z(scores: Floats) -> Floats:
    return np.asarray((scores - scores.mean()) / (scores.std() or 1.0))


# The memory's own


def modes(study: Study) -> dict[str, Ranking]:
    """Return the rankings of `AgenticMemory.search`, by name."""

    def ranking(mode: str, expand: bool) -> Ranking:
        return lambda question: [
            hit.note
            for hit in study.memory.search(question.question, k=NOTES, mode=mode, expand=expand)
        ]

    return {
        f"search {mode}{'' if expand else ', expand=False'}": ranking(mode, expand)
        for mode in ("dense", "text", "hybrid")
        for expand in (False, True)
    }


@dataclass(frozen=True)
class Sample:
    """The features of one question's candidates."""

    study: Study
    question: Question
    ids: list[str]
    features: Floats

    @property
    def target(self) -> Floats:
        """Which candidates are evidence, adding up to 1; (n_candidates,)."""
        notes = {note.id: note.source for note in self.study.notes}
        name = self.study.conversation.id
        evidence = {f"{name}/{turn}" for turn in self.question.evidence}
        hit = np.array([notes[key] in evidence for key in self.ids], float)
        return hit / max(1.0, hit.sum())


def samples(study: Study, *, expand: bool = True) -> Iterator[Sample]:
    memory = study.memory
    retriever = Retriever(memory.store, memory.embedder, user=memory.user)
    for question in study.questions:
        asked, reading = retriever.reading(Query(question.question, k=NOTES, expand=expand))
        yield Sample(study, question, reading.ids, asked.features(reading))


def learnt(drawn: Sequence[Sample], columns: Sequence[int]) -> Floats:
    """Return the weights under which evidence is likeliest (softmax over a question's candidates).

    Args:
        drawn: Of the training conversations.
        columns: The features that have a weight; the others get 0.
    """
    sets = [
        (torch.tensor(sample.features[:, columns]), torch.tensor(sample.target))
        for sample in drawn
        if sample.target.any()
    ]
    content = torch.tensor([column < CONTENT for column in columns])
    weights = torch.where(content, 10.0, 0.0).double().requires_grad_()
    penalty = torch.where(content, PENALTY / 100, PENALTY)
    optimiser = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        each = [-(target * torch.log_softmax(x @ weights, 0)).sum() for x, target in sets]
        total: torch.Tensor = torch.stack(each).mean() + (penalty * weights**2).sum()
        total.backward()
        return total

    optimiser.step(loss)
    found = np.zeros(len(FEATURES))
    found[list(columns)] = weights.detach().numpy()
    return np.asarray(found / found[:CONTENT].sum())


def ranked(sample: Sample, weights: Floats) -> list[Note]:
    notes = {note.id: note for note in sample.study.notes}
    order = best_first(sample.ids, sample.features @ weights)
    return [notes[sample.ids[place]] for place in order[:NOTES]]


def ablation(studies: Sequence[Study]) -> Iterator[Scores]:
    """Yield what is found without each ingredient, the weights learnt anew without it."""
    drawn = {
        expand: [sample for study in studies for sample in samples(study, expand=expand)]
        for expand in (True, False)
    }
    whole = list(range(len(FEATURES)))
    variants: list[tuple[str, bool, list[int]]] = [
        ("everything", True, whole),
        ("no conversation", False, whole),
        ("no cues", True, whole[:CONTENT]),
        ("no cues, no conversation", False, whole[:CONTENT]),
        *((f"no {FEATURES[at]}", True, [one for one in whole if one != at]) for at in whole),
    ]
    for name, expand, columns in variants:
        chosen = drawn[expand]
        seen = [sample for sample in chosen if sample.study.conversation.id in TRAIN]
        weights = learnt(seen, columns)
        scores = Scores(name)
        for sample in chosen:
            scores.conversations.append(sample.study.conversation.id)
            scores.categories.append(sample.question.category)
            scores.recalls.append(sample.study.recalls(sample.question, ranked(sample, weights)))
        yield scores


# Tables


def table(rows: Sequence[Scores], *, unseen: bool) -> Iterator[str]:
    titles = (*COLUMNS, *(f"{name} @1,000" for name in CATEGORIES.values()))
    yield f"| retrieval | {' | '.join(titles)} |"
    yield "|---" * (len(titles) + 1) + "|"
    for row in rows:
        kinds = [row.where(unseen=unseen, category=kind)[:, 2] for kind in CATEGORIES]
        cells = [*row.where(unseen=unseen).T, *kinds]
        means = (f"{cell.mean():.1f}" if cell.size else "none" for cell in cells)
        yield f"| {row.name} | {' | '.join(means)} |"


def difference(one: Scores, other: Scores) -> str:
    """Return the paired difference on unseen conversations with its 95 % interval."""
    values = one.where(unseen=True) - other.where(unseen=True)
    names = [name for name in one.conversations if name not in TRAIN]
    numbers = np.random.default_rng(0)
    groups = [values[[name == chosen for name in names]] for chosen in dict.fromkeys(names)]
    means = [
        np.concatenate(
            [group[numbers.integers(0, len(group), len(group))] for group in groups]
        ).mean(axis=0)
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    cells = zip(COLUMNS, values.mean(axis=0), low, high, strict=True)
    return ", ".join(f"{name} {mean:+.1f} [{a:+.1f}, {b:+.1f}]" for name, mean, a, b in cells)


def sections(rows: Sequence[Scores]) -> Iterator[str]:
    count = len(rows[0].recalls)
    names = dict.fromkeys(rows[0].conversations)
    yield f"All {len(names)} conversations, {count} questions with evidence:\n"
    yield from table(rows, unseen=False)
    unseen = [name for name in names if name not in TRAIN]
    if unseen and len(unseen) < len(names):
        size = len(rows[0].where(unseen=True))
        yield f"\n{', '.join(unseen)}, on which no weight was learnt, {size} questions:\n"
        yield from table(rows, unseen=True)


def build(conversation: Conversation, folder: Path, embedder: Embedder) -> Study:
    memory = AgenticMemory(
        folder / conversation.id, embedder=embedder, policy=EvolutionPolicy.raw()
    )
    if not memory.count():
        memory.add_many(turn_items(conversation), wave=512)
    turns = {f"{conversation.id}/{turn.id}": place for place, turn in enumerate(conversation.turns)}
    notes = sorted(memory.all(), key=lambda note: turns[note.source or ""])
    return Study(conversation, memory, notes)


def report(studies: Sequence[Study], embedder: Embedder) -> Iterator[str]:
    rows: dict[str, Scores] = {}
    for study in studies:
        rankings: Mapping[str, Ranking] = {**standing(study, embedder), **modes(study)}
        for name, ranking in rankings.items():
            rows.setdefault(name, Scores(name)).add(study, ranking)
        print(study.conversation.id, "done", file=sys.stderr)
    yield from sections(list(rows.values()))
    if any(name not in TRAIN for name in rows["dense"].conversations):
        against = difference(rows["search hybrid"], rows["z-scores summed"])
        yield f"\nsearch hybrid against z-scores summed there, 95 % interval: {against}"


def learning(studies: Sequence[Study]) -> Iterator[str]:
    seen = [study for study in studies if study.conversation.id in TRAIN]
    found = learnt([sample for study in seen for sample in samples(study)], range(len(FEATURES)))
    for name, weight, current in zip(FEATURES, found, WEIGHTS, strict=True):
        yield f"{name:9} {weight:+.3f}  (in use {current:+.3f})"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    beside = Path(__file__).parents[2] / "shared" / "data" / "locomo8.json"
    options.add_argument("--data", default=os.environ.get("LOCOMO_PATH", str(beside)))
    options.add_argument("--conversations", help="comma-separated; else all in the file")
    options.add_argument("--stores", help="a folder that keeps the stores for the next run")
    options.add_argument("--ablate", action="store_true")
    options.add_argument("--learn", action="store_true")
    given = options.parse_args()
    if not Path(given.data).is_file():
        print(f"LoCoMo is not at {given.data}: name the file with --data; nothing was measured")
        return
    wanted = given.conversations.split(",") if given.conversations else None
    embedder = Embedder()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(given.stores or scratch)
        studies = [
            build(conversation, folder, embedder)
            for conversation in load_locomo(given.data)
            if wanted is None or conversation.id in wanted
        ]
        lines = (
            sections(list(ablation(studies)))
            if given.ablate
            else learning(studies)
            if given.learn
            else report(studies, embedder)
        )
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
