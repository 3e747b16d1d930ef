"""The command line `amem`: a thin layer over the library.

Importing it, and every `--help`, loads neither dspy nor torch nor lancedb.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run `amem` with the arguments of this process, and exit."""
    from amem_dspy.cli.app import app

    app(prog_name="amem")
