"""The exceptions of amem-dspy, by what the caller does next.

AmemError
├── ConfigError              fix a setting: model, embedder, program file, store address
│   ├── MissingExtraError    install an extra
│   └── EmbedderMismatchError  open the store with the embedder it was made with
├── InvalidInputError        fix the value handed in
├── NoteNotFoundError        there is no such note of this user
├── SourceConflictError      the idempotency key holds other content: call `update`
├── StoreError               the files of the store are damaged or out of reach
│   ├── DamagedStoreError    a file is missing or unreadable: `amem doctor --repair`
│   ├── DiskFullError        free some space
│   ├── StoreVersionError    open the store with the amem-dspy that wrote it
│   └── ReadOnlyStoreError   make the folder writable, or only read
├── ConflictError            another writer was first: read again and redo
├── ModelError               a call of the language model failed (DSPy's error is its cause)
│   ├── ModelAccessError     set the provider's key, or pay
│   ├── ModelUnreachableError  check network, address and server, or try again
│   ├── RateLimitError       wait `retry_after` seconds
│   ├── ContextOverflowError lower the budget that the message names
│   ├── RequestRefusedError  change the model's name or its settings
│   └── ModelServerError     the provider is at fault: try again later
├── ExtractionError          the model's replies did not validate (see `extraction`)
├── DataError                a data file does not have the expected layout
└── BudgetSpentError         a limit on model calls was reached
"""

from __future__ import annotations

from collections.abc import Sequence


class AmemError(Exception):
    """Root of every error that amem-dspy raises itself.

    Attributes:
        code: Stable short name of the kind of error.
    """

    code = "amem"


class ConfigError(AmemError):
    """A setting is wrong; the message names it and a right value."""

    code = "config"


class MissingExtraError(ConfigError):
    """A part that is an optional install is not there.

    Attributes:
        extra: Name of the extra, as in `pip install "amem-dspy[extra]"`.
    """

    code = "missing_extra"

    def __init__(self, extra: str, *, needed_for: str, install: str | None = None) -> None:
        self.extra = extra
        command = install or f'pip install "amem-dspy[{extra}]"'
        super().__init__(f"{needed_for} needs an optional part that is not installed: {command}")


class EmbedderMismatchError(ConfigError):
    """The store was made with another embedder.

    Attributes:
        expected: Embedder id and dimension that the store records.
        got: Embedder id and dimension it was opened with.
    """

    code = "embedder_mismatch"

    def __init__(self, *, uri: str, expected: tuple[str, int], got: tuple[str, int]) -> None:
        self.expected = expected
        self.got = got
        super().__init__(
            f"the store {uri} was made with the embedder {expected[0]} ({expected[1]} dimensions) "
            f"and opened with {got[0]} ({got[1]} dimensions); vectors of two embedders cannot be "
            f"compared. Open it with embedder={expected[0]!r}, or embed it anew: memory.reindex()"
        )


class InvalidInputError(AmemError, ValueError):
    """A value handed in cannot be used; the message names it and the fix."""

    code = "invalid_input"


class NoteNotFoundError(AmemError, LookupError):
    """There is no note with this id under this user.

    Attributes:
        note_id: The id that was asked for.
    """

    code = "note_not_found"

    def __init__(self, note_id: str, *, user: str) -> None:
        self.note_id = note_id
        super().__init__(f"user {user!r} has no note {note_id!r}; `memory.all()` lists the ids")


class SourceConflictError(AmemError):
    """The idempotency key is taken by a note with other content.

    Attributes:
        source: The key.
        note_id: The note that holds it.
    """

    code = "source_conflict"

    def __init__(self, source: str, *, note_id: str) -> None:
        self.source = source
        self.note_id = note_id
        super().__init__(
            f"source {source!r} already belongs to note {note_id!r} with other content; "
            f"to change it call memory.update({note_id!r}, content=...)"
        )


class StoreError(AmemError):
    """The store cannot be read or written; nothing was changed.

    Attributes:
        path: The file or address concerned.
    """

    code = "store"

    def __init__(self, message: str, *, path: str) -> None:
        self.path = path
        super().__init__(message)


class ReadOnlyStoreError(StoreError):
    """The store can be read and not written; nothing was changed."""

    code = "store_read_only"


class DamagedStoreError(StoreError):
    """A file of the store is missing or unreadable; nothing was changed."""

    code = "store_damaged"


class DiskFullError(StoreError):
    """There is no space left for the change; nothing was changed."""

    code = "disk_full"


class StoreVersionError(StoreError):
    """Another version of amem-dspy made the store; nothing was changed."""

    code = "store_version"


class ConflictError(AmemError):
    """Notes changed between reading and writing; nothing was written.

    Attributes:
        note_ids: The notes whose revision was not the expected one.
    """

    code = "conflict"

    def __init__(self, note_ids: Sequence[str]) -> None:
        self.note_ids = tuple(note_ids)
        super().__init__(
            f"changed by another writer meanwhile: {', '.join(self.note_ids)}; read again and redo"
        )


class ModelError(AmemError):
    """A call of the language model failed; nothing was stored. Its cause is DSPy's own error.

    Attributes:
        model: Name of the model.
        status: HTTP status, where a server answered.
        retry_after: Seconds that the server asked to wait, where it said so.
    """

    code = "model"

    def __init__(
        self,
        message: str,
        *,
        model: str | None = None,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        self.model = model
        self.status = status
        self.retry_after = retry_after
        super().__init__(message)


class ModelAccessError(ModelError):
    """The provider's key is missing or wrong, or its account is out of credit."""

    code = "model_access"


class ModelUnreachableError(ModelError):
    """No answer came: no network, a wrong address, a server that is down or too slow."""

    code = "model_unreachable"


class RateLimitError(ModelError):
    """The provider asks for a pause, and the tries have run out or the pause is too long."""

    code = "rate_limit"


class ContextOverflowError(ModelError):
    """The prompt is longer than the model's context; the message names what makes it shorter."""

    code = "context_overflow"


class RequestRefusedError(ModelError):
    """The request cannot be served as it is: an unknown model, a setting it does not take."""

    code = "request_refused"


class ModelServerError(ModelError):
    """The provider failed while it worked on the request."""

    code = "model_server"


class DataError(AmemError):
    """A data file does not have the expected layout; the message names the place."""

    code = "data"


class BudgetSpentError(AmemError):
    """A limit on model calls was reached."""

    code = "budget_spent"
