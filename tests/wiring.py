"""Derive from the modules what is said of their parts elsewhere: ``python tests/wiring.py``.

A module's ``__all__`` names what the package and the module's room export, ``__room__`` what the room exports besides.
Of the exported classes those of a kind below are parts that a config describes, by their constructors' arguments. A
class says what its kind and name do not: ``CONFIG_NAME``, another name in configs, or None for none, and
``HANDED_OVER``, the arguments that a program hands over, so that no config gives them.

It writes ``wiring.json``, which the package reads, the stubs, which type checkers read, and of the guide the table of
names and the reference, a page for each room.
Run it after any change of a part's arguments; a test fails where they differ.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import subprocess
import types
import typing
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import MISSING

NAME = "torchrl_lightning"
PACKAGE = Path(__file__).resolve().parents[1] / "plugin" / NAME
DATA = PACKAGE / "wiring.json"
GUIDE = PACKAGE.parents[1] / "examples" / "guide" / "extending.md"
REFERENCE = GUIDE.parent / "reference"
HEAD = "| group | name | what it is |\n| --- | --- | --- |\n"
PRIMITIVES = (bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Parts of one base class.

    Attributes:
        group: That of their configs.
        base: The class.
        ending: What their names leave out.
        directives: Those for Hydra.
        torchrl: TorchRL's groups, which have them, too.
    """

    group: str
    base: str
    ending: str = ""
    directives: dict[str, bool] = dataclasses.field(default_factory=dict)
    torchrl: tuple[str, ...] = ()


FINISHED = {"partial": True}  # by a program, which hands the rest over
KINDS = (
    Kind("storage", "torchrl.data.replay_buffers.Storage", "Storage", torchrl=("storage",)),
    Kind("writer", "torchrl.data.replay_buffers.Writer", "Writer", torchrl=("writer",)),
    Kind("sampler", "torchrl.data.replay_buffers.Sampler", "Sampler", torchrl=("sampler",)),
    # Also the module of TorchRL's ModuleTransform, which its group ``value`` is for.
    Kind("value", f"{NAME}.rollout.advantages.AdvantageTransform", torchrl=("transform", "value")),
    Kind("estimator", f"{NAME}.rollout.estimates.Estimator"),
    Kind("transform", "torchrl.envs.Transform", "Transform", torchrl=("transform",)),
    Kind("buffer", "torchrl.data.ReplayBuffer", "(OnPolicy|Replay)?Buffer", FINISHED, ("replay_buffer",)),
    Kind("source", f"{NAME}.BranchedReplay", "Replay", FINISHED),
    Kind("data", f"{NAME}.ExperienceDataModule", "DataModule"),
    Kind("env", f"{NAME}.EnvironmentRecipe", directives={"recursive": False}),  # which builds what it is made of
    Kind("model", f"{NAME}.learn.agents.AgentModule", "Module|Agent"),
    Kind("network", f"{NAME}.learn.network_protocol.Network", "Network"),
    Kind("intrinsic", f"{NAME}.RandomNetworkDistillation"),
    Kind("dynamics", f"{NAME}.WorldModelFit", "Fit"),
    Kind("planner", f"{NAME}.learn.planners.ShootingPlanner", "Planner", FINISHED),
    Kind("callback", "lightning.pytorch.Callback"),
)
TORCHRL = {kind.group: kind.torchrl for kind in KINDS if kind.torchrl}
# Lightning's own, whose callbacks and loggers have groups of their own.
TRAINER = ("lightning.Trainer", "trainer", "trainer", ("callbacks", "logger"))


def exports() -> dict[str, dict[str, str]]:
    """Map the package and its rooms to their names, and these to the modules that define them; nothing is imported."""
    found: dict[str, dict[str, str]] = {NAME: {}}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join([NAME, *path.relative_to(PACKAGE).with_suffix("").parts])
        room = module.rpartition(".")[0]
        for statement in ast.parse(path.read_text()).body:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if path.stem == "__init__" or not isinstance(target, ast.Name) or target.id not in ("__all__", "__room__"):
                continue
            for name in ast.literal_eval(statement.value):
                found.setdefault(room, {})[name] = module
                if target.id == "__all__":
                    found[NAME][name] = module
    return {room: dict(sorted(names.items())) for room, names in sorted(found.items())}


def parts(names: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the target of each part, and what its configs are made of."""
    bases = [(kind, imported(kind.base)) for kind in KINDS]
    for name, module in names.items():
        component = getattr(import_module(module), name)
        kind = next((kind for kind, base in bases if base in getattr(component, "__mro__", ())), None)
        if kind is None:
            continue
        called = vars(component).get("CONFIG_NAME", config_name(name, kind.ending))
        if called is not None:
            handed_over = sorted(vars(component).get("HANDED_OVER", ())) or inherited(component)
            yield f"{NAME}.{name}", described(component, kind.group, called, handed_over, kind.directives)
    target, group, called, left_out = TRAINER
    yield target, described(imported(target), group, called, left_out, {})


def described(
    component: type, group: str, name: str, handed_over: Sequence[str], directives: dict[str, bool]
) -> dict[str, Any]:
    """Say of a part what is written about it."""
    arguments = config_fields(component)
    if unknown := sorted(set(handed_over) - set(arguments)):
        raise ValueError(f"{component.__name__} takes no {', '.join(unknown)}.")
    written = {argument: f"{text(kind)} = {json.dumps(default)}" for argument, (kind, default) in arguments.items()}
    return {
        "group": group,
        "name": name,
        "directives": directives,
        "handed_over": list(handed_over),
        "arguments": written,
    }


def inherited(component: type) -> list[str]:
    """Name what is handed over to a class by what its bases say, as far as it takes it."""
    return sorted(set(getattr(component, "HANDED_OVER", ())) & set(inspect.signature(component).parameters))


def config_name(name: str, ending: str) -> str:
    """Name a class in configs: its words but the ending of its kind, with underscores between them.

    Examples:
        >>> config_name("VTraceAdvantages", ""), config_name("RingStorage", "Storage")
        ('vtrace_advantages', 'ring')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", re.sub(f"({ending})$", "", name)).lower()


def config_fields(component: type) -> dict[str, tuple[Any, Any]]:
    """Return the types and defaults of a constructor's arguments, as a config can hold them."""
    parameters = inspect.signature(component).parameters
    return {
        name: (checked_type(_annotation(component, each)), _default(component, each))
        for name, each in parameters.items()
    }


def checked_type(annotation: Any) -> Any:
    """Return the type that OmegaConf checks for an annotation: ``Any`` where it cannot, e.g. for keys and factories."""
    import torch

    if annotation in PRIMITIVES:
        return annotation
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        kinds = {type(each) for each in arguments}
        return kinds.pop() if len(kinds) == 1 else Any
    if origin in (list, Sequence) or (origin is tuple and arguments[1:] == (...,)):
        return types.GenericAlias(list, (arguments[0],)) if arguments[0] in PRIMITIVES else Any
    if origin in (typing.Union, types.UnionType):
        named = (type(None), torch.device, torch.dtype, Path)  # but for None, they are written as texts
        members = [checked_type(each) for each in arguments if each not in named]
        kinds = set(members)
        if Any in kinds or (len(kinds) > 1 and not kinds <= set(PRIMITIVES)):
            return Any
        # Of two equal unions Python keeps the one that was made first, by whatever library: their order says nothing.
        union, *others = [each for each in PRIMITIVES if each in kinds] or members[:1]
        for other in others:
            union |= other
        return union | None if type(None) in arguments else union
    return Any


def text(kind: Any) -> str:
    """Write a checked type."""
    plain = isinstance(kind, type) and not typing.get_args(kind)
    return kind.__name__ if plain else str(kind).removeprefix("typing.")


def imported(target: str) -> Any:
    """Import what a dotted name leads to."""
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


def _annotation(component: type, parameter: inspect.Parameter) -> Any:
    known = component.__init__.__annotations__.get(parameter.name, parameter.annotation)  # type: ignore[misc]
    if not isinstance(known, str):
        return known
    try:
        return eval(parameter.annotation, component.__init__.__globals__)  # type: ignore[misc]
    except NameError:  # imported for type checkers alone
        return Any


def _default(component: type, parameter: inspect.Parameter) -> Any:
    default = parameter.default
    if dataclasses.is_dataclass(component):
        field = next(field for field in dataclasses.fields(component) if field.name == parameter.name)
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
    if default is parameter.empty or isinstance(default, type):
        return MISSING  # a config has no classes
    return str(default).removeprefix("torch.") if type(default).__module__ == "torch" else default


def stubs(names: dict[str, dict[str, str]]) -> dict[Path, str]:
    """Write the stubs of the package and its rooms."""
    title = '"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""\n\n'
    return {
        PACKAGE.joinpath(*room.split(".")[1:], "__init__.pyi"): title
        + formatted("".join(f"from {module} import {name} as {name}\n" for name, module in found.items()))
        + ("\n__version__: str\n" if room == NAME else "")
        for room, found in names.items()
    }


def formatted(source: str) -> str:
    command = ["ruff", "check", "--no-cache", "--select=I", "--fix", "--quiet", "--stdin-filename=x.pyi", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def guide(described: dict[str, Any]) -> str:
    """Put the table of names into the guide's page: each part by the first line of its docstring."""
    rows = []
    for kind, groups in TORCHRL.items():
        named = ", ".join(f"`{group}`" for group in groups)
        for target, part in described.items():
            if part["group"] == kind:
                name, summary = target.rpartition(".")[2], _summary(imported(target))
                rows.append(f"| {named} | `{part['name']}` (`{name}`) | {summary} |\n")
    before, _, rest = GUIDE.read_text().partition(HEAD)
    return before + HEAD + "".join(rows) + "\n" + rest.partition("\n\n")[2]


def reference(names: dict[str, dict[str, str]]) -> dict[Path, str]:
    """Write the pages of the reference: what a room exports, whose text the builder of the site puts in."""
    rooms: dict[str, list[str]] = {}
    for name, module in names[NAME].items():
        rooms.setdefault(module.split(".")[1], []).append(f"::: {module}.{name}\n")
    return {REFERENCE / f"{room}.md": "\n".join([f"# {room}\n", *found]) for room, found in rooms.items()}


def _summary(component: type) -> str:
    line = (component.__doc__ or "").partition("\n")[0]
    return re.sub(r"``|\\[()]", "`", re.sub(r":class:`(\w+)`", r"`\1`", line)).replace("|", r"\|")


def data(names: dict[str, dict[str, str]], described: dict[str, Any]) -> str:
    return json.dumps({"exports": names, "torchrl": TORCHRL, "parts": described}, indent=1) + "\n"


def main() -> None:
    names = exports()
    for path, text in {**stubs(names), **reference(names)}.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    DATA.write_text(data(names, {}))  # what the import of the modules below reads
    described = dict(parts(names[NAME]))
    DATA.write_text(data(names, described))
    GUIDE.write_text(guide(described))


if __name__ == "__main__":
    main()
