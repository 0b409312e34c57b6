"""Measure the code of a checkout: ``python -m tests.house [FOLDER] [--walks]``. The default is this checkout.

Lines of code exclude docstrings, comments, blank lines and imports. Reflection is every use of ``getattr``,
``hasattr``, ``setattr``, ``delattr``, ``vars``, ``locals``, ``attrgetter``, ``__dict__`` and ``except
AttributeError``. A private name of another library is an underscored name that the package reads but does not define.
``--walks`` also runs a few steps of training, and counts our files and calls in each (``tests/walks.py``).
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "torchrl_lightning"
LONG = 500  # lines of a file
REFLECTION = ("getattr", "hasattr", "setattr", "delattr", "vars", "locals", "attrgetter")
COUNTED = ("isinstance on own types", "attributes set from outside", "private names of other libraries")
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
ARGUMENTS = """
import inspect, torchrl_lightning as package
classes = [each for name in package.__all__ if inspect.isclass(each := getattr(package, name))]
counts = sorted((len(inspect.signature(each).parameters), each.__name__) for each in classes)
print(sum(count for count, _ in counts), "of", len(counts), "public classes; most:",
      ", ".join(f"{name} {count}" for count, name in counts[:-4:-1]))
"""

BASES = """
from torchrl_lightning import PPODBuffer
own = [each for each in PPODBuffer.__mro__ if each.__module__.startswith("torchrl_lightning")]
print(len(own), "own classes,", len({name for each in own for name in vars(each) if name[0] != "_"}), "public members")
"""


def code_lines(file: Path, tree: ast.Module) -> int:
    """Count the lines of code in a file."""
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
    """Return the names of the package's classes."""
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def own_names(trees: list[ast.Module]) -> set[str]:
    """Return the names of the functions, classes, modules, variables and attributes that the package defines."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def measures(tree: ast.Module, types: set[str], names: set[str]) -> Iterator[str]:
    """Yield the measure of each reflection, attribute assignment and private name in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in REFLECTION:
                yield name
            elif name == "isinstance":
                asked = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                asked |= {each.attr for each in ast.walk(node.args[1]) if isinstance(each, ast.Attribute)}
                if asked & types:
                    yield "isinstance on own types"
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            if any(isinstance(each, ast.Name) and each.id == "AttributeError" for each in ast.walk(node.type)):
                yield "except AttributeError"
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (leaf for each in targets for leaf in _leaves(each)):
                if isinstance(target, ast.Attribute) and not _is_own(target.value):
                    yield "attributes set from outside"
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith(PACKAGE):
            parts = [*(node.module or "").split("."), *(each.name for each in node.names)]
            if any(_is_private(part) for part in parts) and node.module != "__future__":
                yield "private names of other libraries"
        if isinstance(node, ast.Attribute):
            if node.attr == "__dict__":
                yield "__dict__"
            elif _is_private(node.attr) and node.attr not in names:
                yield "private names of other libraries"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _leaves(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _leaves(each)
    else:
        yield target


def _is_own(holder: ast.expr) -> bool:
    return isinstance(holder, ast.Name) and holder.id in ("self", "cls", "ctx")


def show(root: Path) -> None:
    """Print all measures that need only the source code of a checkout."""
    package = root / "plugin" / PACKAGE
    files = sorted(package.rglob("*.py"))
    trees = [ast.parse(file.read_text()) for file in files]
    rooms, found, total = Counter[str](), Counter[str](), 0
    types, names = own_types(trees), own_names(trees)
    for file, tree in zip(files, trees, strict=True):
        room = file.relative_to(package).parts[0] if file.parent != package else "(loose files)"
        rooms[room] += code_lines(file, tree)
        found.update(measures(tree, types, names))
        total += len(file.read_text().splitlines())
    code = sum(rooms.values())
    tests = [file for file in (root / "tests").rglob("*.py") if "benchmarks" not in file.parts]
    long = [f"{file.relative_to(package)}" for file in files if len(file.read_text().splitlines()) > LONG]
    print(f"package: {code} lines of code of {total} in {len(files)} files")
    print("  " + ", ".join(f"{room} {count}" for room, count in sorted(rooms.items())))
    print(f"tests without benchmarks: {sum(len(file.read_text().splitlines()) for file in tests)} lines")
    print(f"README: {len((root / 'README.md').read_text().splitlines())} lines")
    print(f"files over {LONG} lines: {', '.join(long) or 'none'}")
    reflection = {name: found[name] for name in (*REFLECTION, "__dict__", "except AttributeError") if found[name]}
    uses = sum(reflection.values())
    print(f"reflection: {1000 * uses / code:.1f} per 1,000 lines, {uses} uses: {_listed(reflection)}")
    for name in COUNTED:
        print(f"{name}: {found[name]}")


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def run(root: Path, *arguments: str) -> str:
    """Run Python with the package of a checkout; return its output."""
    environment = {**os.environ, "PYTHONPATH": str(root / "plugin"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a checkout.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--walks", action="store_true", help="also walk through a few steps of training")
    arguments = parser.parse_args()
    root = arguments.folder.resolve()
    show(root)
    print(f"constructor arguments: {run(root, '-c', ARGUMENTS)}")
    print(f"PPODBuffer: {run(root, '-c', BASES)}")
    if arguments.walks:
        for walk in ("dqn", "ppo", "sample", "extend", "command"):
            print(run(root, str(Path(__file__).with_name("walks.py")), walk))


if __name__ == "__main__":
    main()
