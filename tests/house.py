"""The measures of the house: ``python -m tests.house [FOLDER]``, a checkout, this one by default.

Lines of code are those that hold code: no docstrings, comments, blank lines and imports.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "torchrl_lightning"
LONG = 500  # lines of a file
COUNTED = ("isinstance on own types", "hasattr", "attributes set from outside", "passed_on", "locals", "__dict__[")
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(file: Path, tree: ast.Module) -> int:
    """Count the lines of a file that hold code."""
    with file.open("rb") as source:
        tokens = [token for token in tokenize.tokenize(source.readline) if token.type not in SKIPPED]
    lines = {number for token in tokens[1:] for number in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def own_types(trees: list[ast.Module]) -> set[str]:
    """Name the classes of the package."""
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def measures(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Name each question and each poke in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name in ("hasattr", "passed_on", "locals"):
                yield name
            elif name == "isinstance":
                asked = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                asked |= {each.attr for each in ast.walk(node.args[1]) if isinstance(each, ast.Attribute)}
                if asked & own:
                    yield "isinstance on own types"
        elif (
            isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "__dict__"
        ):
            yield "__dict__["
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (leaf for each in targets for leaf in _leaves(each)):
                if isinstance(target, ast.Attribute) and not _is_own(target.value):
                    yield "attributes set from outside"


def _leaves(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _leaves(each)
    else:
        yield target


def _is_own(holder: ast.expr) -> bool:
    return isinstance(holder, ast.Name) and holder.id in ("self", "cls", "ctx")


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    package = root / "plugin" / PACKAGE
    files = sorted(package.rglob("*.py"))
    trees = [ast.parse(file.read_text()) for file in files]
    rooms, found, total = Counter[str](), Counter[str](), 0
    own = own_types(trees)
    for file, tree in zip(files, trees, strict=True):
        room = file.relative_to(package).parts[0] if file.parent != package else "(floor 1)"
        rooms[room] += code_lines(file, tree)
        found.update(measures(tree, own))
        total += len(file.read_text().splitlines())
    tests = [file for file in (root / "tests").rglob("*.py") if "benchmarks" not in file.parts]
    long = [f"{file.relative_to(package)}" for file in files if len(file.read_text().splitlines()) > LONG]
    print(f"package: {sum(rooms.values())} lines of code of {total} in {len(files)} files")
    print("  " + ", ".join(f"{room} {count}" for room, count in sorted(rooms.items())))
    print(f"tests without benchmarks: {sum(len(file.read_text().splitlines()) for file in tests)} lines")
    print(f"README: {len((root / 'README.md').read_text().splitlines())} lines")
    print(f"files over {LONG} lines: {', '.join(long) or 'none'}")
    for name in COUNTED:
        print(f"{name}: {found[name]}")


if __name__ == "__main__":
    main()
