"""Marked sources: each mutant's statement first notes which test has come to it."""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from pathlib import Path

from tests.guard.sites import Site

NOTES = '''"""Write which test has come to a mark, once for each process and test."""
import os
_seen = set()


def note(mark):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
    if test and (mark, test) not in _seen:
        _seen.add((mark, test))
        file = os.open(os.environ["GUARD_WORK"] + "/hits", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{mark}\\t{test}\\n".encode())
        os.close(file)
'''


def mark(sites: list[Site], copy: Path) -> None:
    """Rewrite the copy's sources with a note before the statement of each site."""
    (copy / "plugin" / "guard_notes.py").write_text(NOTES)
    numbered: dict[str, list[tuple[int, Site]]] = defaultdict(list)
    for number, site in enumerate(sites):
        numbered[site.file].append((number, site))
    for file, marked in numbered.items():
        path = copy / file
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        tree = ast.parse(source)
        # Behind the docstring and what must be first; from the last mark on, so that the others keep their lines.
        first = next(
            node for node in tree.body[1:] if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        )
        for number, site in sorted(marked, key=lambda pair: -pair[1].start):
            statement = statement_at(tree, site.line, source, site)
            before = lines[statement.lineno - 1][: statement.col_offset]
            note = f"guard_notes.note({number}); "
            line = lines[statement.lineno - 1]
            if before.strip():  # behind a colon or a semicolon
                lines[statement.lineno - 1] = before + note + line[statement.col_offset :]
            else:
                lines[statement.lineno - 1] = before + note.rstrip("; ") + "\n" + line
        lines[first.lineno - 1] = "import guard_notes\n" + lines[first.lineno - 1]
        path.write_text("".join(lines))
        ast.parse(path.read_text())
    os.sync()


def statement_at(tree: ast.Module, line: int, source: str, site: Site) -> ast.stmt:
    """The innermost statement around a site before which a line can stand: of an ``elif`` the whole ``if``."""
    best: ast.stmt | None = None
    elifs = {
        id(node.orelse[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and len(node.orelse) == 1
        and isinstance(node.orelse[0], ast.If)
        and source.splitlines()[node.orelse[0].lineno - 1].lstrip().startswith("elif")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and id(node) not in elifs and node.lineno <= line <= (node.end_lineno or 0):
            inner = best is None or (node.lineno, -(node.end_lineno or 0), node.col_offset) >= (
                best.lineno,
                -(best.end_lineno or 0),
                best.col_offset,
            )
            if inner and not isinstance(node, ast.ClassDef):
                best = node
    assert best is not None
    return best
