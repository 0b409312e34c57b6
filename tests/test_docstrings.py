"""The sections of docstrings have names that the site and editors recognise."""

from __future__ import annotations

import ast
from pathlib import Path

import torchrl_lightning

PACKAGE = Path(torchrl_lightning.__file__).parent
SECTIONS = {"Args", "Attributes", "Examples", "Note", "Raises", "Returns", "Source", "Warning", "Yields"}


def sections(path: Path) -> set[str]:
    """Return the headings of all sections in the docstrings of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = ast.AsyncFunctionDef | ast.ClassDef | ast.FunctionDef | ast.Module
    texts = (ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))
    lines = (line for text in texts for line in text.splitlines())
    return {line[:-1] for line in lines if line[:1].isupper() and line.endswith(":") and line[:-1].isalpha()}


def test_sections_of_docstrings_are_those_of_the_google_style():
    found = set().union(*map(sections, PACKAGE.rglob("*.py")))
    assert "Examples" in found
    assert found <= SECTIONS
