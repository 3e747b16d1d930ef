"""What is installed, importable and committed."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import amem_dspy
import amem_dspy.optimize
import amem_dspy.signatures

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def texts() -> Iterator[tuple[Path, str]]:
    for path in files():
        if path.suffix in {".py", ".md", ".toml", ".json", ".txt", ".cfg", ""}:
            yield path, path.read_text(encoding="utf-8", errors="replace")


def test_package_list_equals_the_tree() -> None:
    mapping = PROJECT["tool"]["setuptools"]["package-dir"]
    homes = {folder: name for name, folder in mapping.items()}
    found = set()
    for home, name in homes.items():
        for init in (ROOT / home).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / home).parts
            if not (home == "amem_dspy" and inside and inside[0] in ("signatures", "optimize")):
                found.add(".".join((name, *inside)))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


@pytest.mark.parametrize("name", ["signatures", "optimize"])
def test_symlinks_lead_to_the_mapped_folders(name: str) -> None:
    assert (ROOT / "amem_dspy" / name).resolve() == ROOT / name


@pytest.mark.parametrize("module", [amem_dspy, amem_dspy.optimize, amem_dspy.signatures])
def test_public_names_are_sorted_and_exist(module: Any) -> None:
    names = list(module.__all__)
    assert names == sorted(names)
    for name in names:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("name", amem_dspy.__all__)
def test_public_names_do_not_turn_into_modules(name: str) -> None:
    importlib.import_module("amem_dspy.memory")
    assert not isinstance(getattr(amem_dspy, name), type(sys))


def test_public_functions_of_optimize_do_not_turn_into_modules() -> None:
    for path in (ROOT / "optimize").glob("*.py"):
        importlib.import_module(f"amem_dspy.optimize.{path.stem}".removesuffix(".__init__"))
    for name in amem_dspy.optimize.__all__:
        assert not isinstance(getattr(amem_dspy.optimize, name), type(sys)), name


def test_import_is_light() -> None:
    code = (
        "import sys, amem_dspy, amem_dspy.optimize;"
        "print([m for m in ('dspy', 'torch', 'lancedb', 'litellm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_else_becomes_importable() -> None:
    roots = {name.split(".")[0] for name in PROJECT["tool"]["setuptools"]["packages"]}
    assert roots == {"amem_dspy"}


def test_changelog_starts_with_unreleased_or_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.search(r"^## \[?([^\]\n]+)", text, re.MULTILINE)
    assert first is not None
    assert first.group(1).split()[0] in ("Unreleased", amem_dspy.__version__)
    assert PROJECT["project"]["version"] == amem_dspy.__version__


def words(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())


def grams(text: str, size: int = 8) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[at : at + size]) for at in range(len(found) - size + 1)}


def test_tree_holds_no_locomo_text(locomo_path: Path) -> None:
    from amem_dspy.optimize import load_locomo

    theirs: set[tuple[str, ...]] = set()
    for conversation in load_locomo(locomo_path):
        for turn in conversation.turns:
            theirs |= grams(turn.text)
        for question in conversation.questions:
            theirs |= grams(question.question)
    for path, text in texts():
        assert not grams(text) & theirs, path


def test_tree_names_no_registry_and_no_machine() -> None:
    # Spelt in parts, or this file would be the one that is found.
    hosts = ["files." + "pythonhosted.org", "pypi." + "org", "registry." + "npmjs.org"]
    places = ["/" + "work/", "/" + "root/", "/tmp/" + "exp"]
    for path, text in texts():
        for needle in hosts + places:
            assert needle not in text, (path, needle)
