"""`amem reindex`."""

from __future__ import annotations

import json
from typing import Any

import pytest


class Wider:
    """Another embedder than that of the fixtures."""

    id = "wider"
    dimension = 80

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def embed(self, texts: Any) -> Any:
        import numpy as np

        return np.pad(self.inner.embed(texts), ((0, 0), (0, 16)))

    def count_tokens(self, text: str) -> int:
        return len(text.split())


@pytest.fixture
def wider(amem: Any, embedder: Any, monkeypatch: pytest.MonkeyPatch) -> Wider:
    """Let `--embedder wider` name another embedder."""
    other = Wider(embedder)
    monkeypatch.setattr(
        "amem_dspy.embedder.resolve_embedder", lambda name: other if name == "wider" else embedder
    )
    return other


def test_another_embedder_is_refused_with_the_command_that_helps(amem: Any, wider: Wider) -> None:
    amem("add", "Ada owns a lamp.")
    result = amem("search", "lamp", "--embedder", "wider")
    assert result.exit_code == 1
    assert "made with the embedder letters (64 dimensions)" in result.stderr
    assert "amem reindex" in result.stderr
    assert "--embedder letters" in result.stderr


def test_reindex_counts_and_the_store_is_the_new_embedders(
    amem: Any, data: Any, wider: Wider
) -> None:
    for text in ("Ada owns a lamp.", "Bob plays a tune."):
        amem("add", text)
    amem("add", "Eve reads.", "--user", "eve")
    done = data("reindex", "--embedder", "wider")
    assert done == {"embedded": 3, "embedder": "wider", "dimension": 80}
    found = data("search", "lamp", "--embedder", "wider", "--user", "default")
    assert "Ada owns a lamp." in json.dumps(found)
    assert amem("list").exit_code == 1
    again = amem("reindex", "--embedder", "wider")
    assert again.stdout == "embedded 0 notes; the store's embedder is wider\n"


def test_reindex_of_no_store_says_so(amem: Any) -> None:
    result = amem("reindex", "--store", "nowhere")
    assert result.exit_code == 1
    assert "there is no store at nowhere" in result.stderr


def test_a_stopped_reindex_says_how_to_go_on(
    amem: Any, wider: Wider, monkeypatch: pytest.MonkeyPatch
) -> None:
    amem("add", "Ada owns a lamp.")

    def stop(texts: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(wider, "embed", stop)
    result = amem("reindex", "--embedder", "wider")
    assert result.exit_code == 130
    assert "run the same command again to go on" in result.stderr
    assert "Ada owns a lamp." in amem("list").stdout
