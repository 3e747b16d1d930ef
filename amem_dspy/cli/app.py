"""The application with all its commands."""

from __future__ import annotations

import importlib

from amem_dspy.cli.command import app

__all__ = ["app"]

# Each module registers its commands when it is imported.
for _module in (
    *("arms", "change", "compile", "demo", "doctor", "exchange", "ingest", "notes", "programs"),
    *("reindex", "search", "snapshot", "study"),
):
    importlib.import_module(f"amem_dspy.cli.{_module}")
