"""Each group's file begins with a table of its cases; the tests that it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
GROUPS = sorted(Path(__file__).parent.glob("test_group_*.py"))
NAMED = re.compile(r"(?:([\w/]+\.py)::)?\b(test_\w+)\b(?!\.py)")


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("group", GROUPS, ids=lambda path: path.stem)
def test_every_test_that_a_table_names_exists(group: Path) -> None:
    table = ast.get_docstring(ast.parse(group.read_text(encoding="utf-8"))) or ""
    named = [(file or f"cases/{group.name}", name) for file, name in NAMED.findall(table)]
    assert named
    assert [pair for pair in named if pair[1] not in functions(TESTS / pair[0])] == []
