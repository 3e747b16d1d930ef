"""The command that embeds a store anew."""

from __future__ import annotations

from amem_dspy.cli.command import command
from amem_dspy.cli.failure import Interrupted
from amem_dspy.cli.output import Reply, counted
from amem_dspy.cli.session import Session

PANEL = "Upkeep"


@command(
    "reindex",
    example="amem reindex --embedder paraphrase-multilingual-MiniLM-L12-v2",
    panel=PANEL,
)
def reindex(session: Session) -> Reply:
    """Embed the notes of all users with another embedder; stopped and run again, it goes on."""
    with session.memory() as memory, session.output.bars() as bars:
        embedder = memory.embedder
        try:
            count = memory.reindex(
                progress=lambda done, total: bars.update("embedding notes", done, total)
            )
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted; run the same command again to go on") from error
    line = f"embedded {counted(count, 'note')}; the store's embedder is {embedder.id}"
    data = {"embedded": count, "embedder": embedder.id, "dimension": embedder.dimension}
    return Reply(data, [line])
