"""`python -m amem_dspy.cli`."""

from __future__ import annotations

from amem_dspy.cli import main

main()
