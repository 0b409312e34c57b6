"""Where the package can be mutated, and how: in the bodies of functions that numba does not compile."""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path("plugin/torchrl_lightning")

COMPARISONS: dict[type[ast.cmpop], tuple[str, type[ast.cmpop]]] = {
    ast.Eq: ("==", ast.NotEq),
    ast.NotEq: ("!=", ast.Eq),
    ast.Lt: ("<", ast.GtE),
    ast.GtE: (">=", ast.Lt),
    ast.Gt: (">", ast.LtE),
    ast.LtE: ("<=", ast.Gt),
    ast.Is: ("is", ast.IsNot),
    ast.IsNot: ("is not", ast.Is),
    ast.In: ("in", ast.NotIn),
    ast.NotIn: ("not in", ast.In),
}
"""The sign of each, and what it is flipped to."""
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise)
COMPILED = re.compile(r"\b(?:jitted|compiled|row_kernel|run_rows)\((?:\w+\.)?(\w+)[,)]")


@dataclass(frozen=True)
class Site:
    """One change: the node of a file that :func:`ast.walk` comes to as the ``place``-th becomes another."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    place: int
    statement: int

    def applied_to(self, source: str) -> str:
        """Change a file's source."""
        tree = ast.parse(source)
        node = list(ast.walk(tree))[self.place]
        return ast.unparse(_Replaced({node: [changed(node)]}).visit(tree))


class _Replaced(ast.NodeTransformer):
    """Puts other nodes, which may hold the first one, in the places of some."""

    def __init__(self, others: dict[ast.AST, list[ast.AST]]) -> None:
        self.others = others

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        others = self.others.get(node, [node])
        return others if len(others) > 1 else others[0]


def marked(source: str, numbered: dict[int, Site]) -> str:
    """Note before the statement of each site which test has come to it."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    notes: dict[ast.AST, list[ast.AST]] = defaultdict(list)
    for number, site in numbered.items():
        notes[nodes[site.statement]] += ast.parse(f"__import__('guard_notes').note({number})").body
    return ast.unparse(_Replaced({statement: [*found, statement] for statement, found in notes.items()}).visit(tree))


def draw(package: Path, seed: int, count: int) -> list[Site]:
    """A third of each kind, spread evenly over all places of that kind."""
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    kernels = compiled_functions(sources, trees)
    places: dict[str, list[tuple[Path, ast.AST, ast.stmt]]] = {"comparison": [], "constant": [], "statement": []}
    for path, tree in trees.items():
        for node, statement in mutable(tree, kernels):
            if kind := kind_of(node):
                places[kind].append((path, node, statement))
    generator, drawn = random.Random(seed), []
    for kind, found in places.items():
        for path, node, statement in generator.sample(found, count // len(places)):
            numbers = {each: number for number, each in enumerate(ast.walk(trees[path]))}
            # A comparison lies where its sign does.
            begin, end = (node.left, node.comparators[0]) if isinstance(node, ast.Compare) else (node, node)
            file = str(PACKAGE / path.relative_to(package))
            before, after = text(node, sources[path]), text(changed(node))
            site = Site(file, end.lineno, kind, before, after, numbers[node], numbers[statement])
            drawn.append(((file, begin.lineno, begin.col_offset), site))
    return [site for _, site in sorted(drawn, key=lambda pair: pair[0])]


def kind_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return "comparison"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        return "constant"
    return "statement" if isinstance(node, DROPPED) else None


def text(node: ast.AST, source: str = "") -> str:
    """The sign of a comparison; anything else as its source has it, if there is one."""
    if isinstance(node, ast.Compare):
        return COMPARISONS[type(node.ops[0])][0]
    return ast.get_source_segment(source, node) or ast.unparse(node)


def changed(node: ast.AST) -> ast.AST:
    """What a node becomes."""
    if isinstance(node, ast.Compare):
        return ast.Compare(node.left, [COMPARISONS[type(node.ops[0])][1]()], node.comparators)
    if isinstance(node, ast.Constant):
        return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    return ast.Pass()


def compiled_functions(sources: dict[Path, str], trees: dict[Path, ast.Module]) -> set[str]:
    """Names of functions that numba compiles: those handed to the compiler, and those that these call."""
    top = [node for tree in trees.values() for node in tree.body]
    functions = {node.name: node for node in top if isinstance(node, ast.FunctionDef)}
    named = {name for source in sources.values() for name in COMPILED.findall(source)}
    for node in top:
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


def overloads(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("overload" in ast.unparse(mark) for mark in function.decorator_list)


def mutable(tree: ast.Module, kernels: set[str]) -> Iterator[tuple[ast.AST, ast.stmt]]:
    """The nodes in bodies of functions, each with its statement: no messages, annotations, docstrings and kernels."""

    def within(node: ast.AST) -> Iterator[tuple[ast.AST, ast.stmt]]:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in ast.iter_child_nodes(node):
                yield from within(child)
        elif not (node in tree.body and node.name in kernels) and not overloads(node):
            for statement in node.body:
                yield from inside(statement, statement)

    def inside(node: ast.AST, statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.stmt]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from within(node)
            return
        words = isinstance(node, ast.Expr) and (
            isinstance(node.value, ast.Constant) or "log" in ast.unparse(node.value).split(".")[0]
        )
        if words or isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        statement = node if isinstance(node, ast.stmt) else statement
        yield node, statement
        if isinstance(node, ast.Raise):
            return
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "type_comment"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from inside(child, statement)

    yield from within(tree)
