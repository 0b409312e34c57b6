"""Where the package can be mutated, and how."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path("plugin/torchrl_lightning")

FLIPPED = {
    "==": "!=",
    "!=": "==",
    "<": ">=",
    ">=": "<",
    ">": "<=",
    "<=": ">",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
}
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise)
COMPILED = re.compile(r"\b(?:jitted|compiled|row_kernel|run_rows)\((?:\w+\.)?(\w+)[,)]")


@dataclass(frozen=True)
class Site:
    """One change: the text from ``start`` to ``end`` (offsets in the file) becomes ``after``."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int

    def applied_to(self, source: str) -> str:
        assert source[self.start : self.end] == self.before
        return source[: self.start] + self.after + source[self.end :]


def draw(package: Path, seed: int, count: int) -> list[Site]:
    """A third of each kind, spread evenly over all places of that kind."""
    files = sorted(package.rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in files}
    kernels = compiled_functions({path: (path.read_text(), tree) for path, tree in trees.items()})
    places: dict[str, list[Site]] = {"comparison": [], "constant": [], "statement": []}
    for path, tree in trees.items():
        for site in sites(path, str(PACKAGE / path.relative_to(package)), tree, kernels):
            places[site.kind].append(site)
    generator = random.Random(seed)
    drawn = [site for kind in places.values() for site in generator.sample(kind, count // len(places))]
    return sorted(drawn, key=lambda site: (site.file, site.start))


def compiled_functions(sources: dict[Path, tuple[str, ast.Module]]) -> set[str]:
    """Names of functions that numba compiles: those handed to the compiler, and those that these call."""
    functions = {
        node.name: node for _, tree in sources.values() for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    named = {name for text, _ in sources.values() for name in COMPILED.findall(text)}
    for _, tree in sources.values():
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id == "_CALLEES":
                named |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    found: set[str] = set()
    while todo := {name for name in named - found if name in functions}:
        found |= todo
        for name in todo:
            calls = (node.func for node in ast.walk(functions[name]) if isinstance(node, ast.Call))
            named |= {call.id for call in calls if isinstance(call, ast.Name)}
    return found


def sites(path: Path, name: str, tree: ast.Module, kernels: set[str]) -> Iterator[Site]:
    source = path.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()

    def offset(line: int, column: int) -> int:
        return len(data[: starts[line - 1] + column].decode())

    def site(
        node: ast.expr | ast.stmt, kind: str, after: str, start: int | None = None, end: int | None = None
    ) -> Site:
        start = offset(node.lineno, node.col_offset) if start is None else start
        end = offset(node.end_lineno or 0, node.end_col_offset or 0) if end is None else end
        return Site(name, source.count("\n", 0, start) + 1, kind, source[start:end], after, start, end)

    for node in mutable(tree, kernels):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = node.left, node.comparators[0]
            between = offset(left.end_lineno or 0, left.end_col_offset or 0), offset(right.lineno, right.col_offset)
            sign = re.search(r"[=!<>]=|[<>]|is\s+not|not\s+in|is|in", source[slice(*between)])
            assert sign is not None
            begin = between[0] + sign.start()
            yield site(node, "comparison", FLIPPED[" ".join(sign[0].split())], begin, begin + len(sign[0]))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            moved = not node.value if isinstance(node.value, bool) else node.value + 1
            yield site(node, "constant", repr(moved))
        elif isinstance(node, DROPPED):
            yield site(node, "statement", "pass")


def mutable(tree: ast.Module, kernels: set[str]) -> Iterator[ast.AST]:
    """The nodes in bodies of functions: no messages, annotations, defaults, docstrings and kernels."""

    def within(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not (node in tree.body and node.name in kernels) and not any(
                "overload" in ast.unparse(mark) for mark in node.decorator_list
            ):
                for statement in node.body:
                    yield from inside(statement)
            return
        for child in ast.iter_child_nodes(node):
            yield from within(child)

    def inside(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from within(node)
            return
        words = isinstance(node, ast.Expr) and (
            isinstance(node.value, ast.Constant) or "log" in ast.unparse(node.value).split(".")[0]
        )
        if words or isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        yield node
        if isinstance(node, ast.Raise):
            return
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "type_comment"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from inside(child)

    yield from within(tree)
