"""Derive the schemas of configs and the guide's reference from the exported classes: ``python tests/wiring.py``.

Configs describe the exported classes of the kinds below by their constructors' arguments. The class attribute
``CONFIG_NAME`` replaces the name in configs; None excludes the class. ``RUNTIME_ARGUMENTS`` lists the arguments that
a program passes instead of a config.

The script writes ``schemas.json``, which the package reads. In the guide it writes the table of names, the tables of
settings between the marks of pages, and a reference page for each folder of the package. Run it after any change of a
constructor's arguments or of a config; a test fails if they differ.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torchrl_lightning._hydra.schemas import TORCHRL_GROUPS

NAME = "torchrl_lightning"
PACKAGE = Path(__file__).resolve().parents[1] / "plugin" / NAME
DATA = PACKAGE / "_hydra" / "schemas.json"
GUIDE = PACKAGE.parents[1] / "examples" / "guide" / "extending.md"
REFERENCE = GUIDE.parent / "reference"
CONF = PACKAGE.parents[1] / "conf"
MARKED_SETTINGS = re.compile(r"(<!-- settings: (\w+/\w+) -->\n)(.*?)(<!-- end of settings -->)", re.DOTALL)
HEAD = "| group | name | what it is |\n| --- | --- | --- |\n"
PRIMITIVES = (bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class Kind:
    """The exported classes with one base class.

    Attributes:
        group: The group of their configs.
        base: The base class.
        ending: A pattern of the ending that config names omit.
        directives: Directives for Hydra.
    """

    group: str
    base: str
    ending: str = ""
    directives: dict[str, bool] = dataclasses.field(default_factory=dict)


FINISHED = {"partial": True}  # a program passes the remaining arguments
KINDS = (
    Kind("storage", "torchrl.data.replay_buffers.Storage", "Storage"),
    Kind("writer", "torchrl.data.replay_buffers.Writer", "Writer"),
    Kind("sampler", "torchrl.data.replay_buffers.Sampler", "Sampler"),
    Kind("value", f"{NAME}.rollout.advantages.AdvantageTransform"),
    Kind("estimator", f"{NAME}.rollout.estimates.Estimator"),
    Kind("transform", "torchrl.envs.Transform", "Transform"),
    Kind("buffer", "torchrl.data.ReplayBuffer", "(OnPolicy|Replay)?Buffer", FINISHED),
    Kind("source", f"{NAME}.BranchedReplay", "Replay", FINISHED),
    Kind("data", f"{NAME}.ExperienceDataModule", "DataModule"),
    Kind("env", f"{NAME}.EnvironmentRecipe", directives={"recursive": False}),  # it builds its own parts
    Kind("model", f"{NAME}.agents.base.AgentModule", "Module|Agent"),
    Kind("network", f"{NAME}.agents.networks.network_protocol.Network", "Network"),
    Kind("intrinsic", f"{NAME}.RandomNetworkDistillation"),
    Kind("dynamics", f"{NAME}.WorldModelFit", "Fit"),
    Kind("planner", f"{NAME}.agents.model_based.planners.ShootingPlanner", "Planner", FINISHED),
    Kind("callback", "lightning.pytorch.Callback"),
)
# The callbacks and loggers of Lightning's trainer have their own groups.
TRAINER = ("lightning.Trainer", "trainer", "trainer", ("callbacks", "logger"))


def exports(package: str = NAME) -> dict[str, str]:
    """Map the exported names of a package's stub to the modules from which the stub imports them."""
    stub = PACKAGE.joinpath(*package.split(".")[1:], "__init__.pyi")
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {each.name: f"{package}.{node.module}" for node in imports for each in node.names}


def parts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the target of each part, and the description of its configs."""
    bases = [(kind, imported(kind.base)) for kind in KINDS]
    for name in sorted(exports()):
        component = imported(f"{NAME}.{name}")
        kind = next((kind for kind, base in bases if base in getattr(component, "__mro__", ())), None)
        if kind is None:
            continue
        called = vars(component).get("CONFIG_NAME", config_name(name, kind.ending))
        if called is not None:
            handed_over = sorted(vars(component).get("RUNTIME_ARGUMENTS", ())) or inherited(component)
            yield f"{NAME}.{name}", described(component, kind.group, called, handed_over, kind.directives)
    target, group, called, left_out = TRAINER
    yield target, described(imported(target), group, called, left_out, {})


def described(
    component: type, group: str, name: str, handed_over: Sequence[str], directives: dict[str, bool]
) -> dict[str, Any]:
    """Return the description of a part for the schemas."""
    arguments = config_fields(component)
    if unknown := sorted(set(handed_over) - set(arguments)):
        raise ValueError(f"{component.__name__} takes no {', '.join(unknown)}.")
    return {
        "group": group,
        "name": name,
        "directives": directives,
        "handed_over": list(handed_over),
        "arguments": {argument: [text(kind), *default] for argument, (kind, default) in arguments.items()},
    }


def inherited(component: type) -> list[str]:
    """Return the runtime arguments of a class's bases that its own constructor accepts."""
    return sorted(set(getattr(component, "RUNTIME_ARGUMENTS", ())) & set(inspect.signature(component).parameters))


def config_name(name: str, ending: str) -> str:
    """Return the name of a class in configs: its words without the ending of its kind, joined by underscores.

    Examples:
        >>> config_name("VTraceAdvantages", ""), config_name("RingStorage", "Storage")
        ('vtrace_advantages', 'ring')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", re.sub(f"({ending})$", "", name)).lower()


def config_fields(component: type) -> dict[str, tuple[Any, list[Any]]]:
    """Return the type of each constructor argument and a list with its default, if it has one, as in a config."""
    parameters = inspect.signature(component).parameters
    return {
        name: (checked_type(_annotation(component, each)), _default(component, each))
        for name, each in parameters.items()
    }


def checked_type(annotation: Any) -> Any:
    """Return the type that OmegaConf checks for an annotation: ``Any`` if it cannot, e.g. for keys and factories."""
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
        named = (type(None), torch.device, torch.dtype, Path)  # a config contains them as texts, except None
        members = [checked_type(each) for each in arguments if each not in named]
        kinds = set(members)
        if Any in kinds or (len(kinds) > 1 and not kinds <= set(PRIMITIVES)):
            return Any
        # Python reuses the first of several equal unions, so the order of its members is arbitrary: sort them.
        union, *others = [each for each in PRIMITIVES if each in kinds] or members[:1]
        for other in others:
            union |= other
        return union | None if type(None) in arguments else union
    return Any


def text(kind: Any) -> str:
    """Return the name of a checked type."""
    plain = isinstance(kind, type) and not typing.get_args(kind)
    return kind.__name__ if plain else str(kind).removeprefix("typing.")


def imported(target: str) -> Any:
    """Import the object with a dotted name."""
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


def _annotation(component: type, parameter: inspect.Parameter) -> Any:
    known = component.__init__.__annotations__.get(parameter.name, parameter.annotation)  # type: ignore[misc]
    if not isinstance(known, str):
        return known
    try:
        return eval(parameter.annotation, component.__init__.__globals__)  # type: ignore[misc]
    except NameError:  # imported only for type checkers
        return Any


def _default(component: type, parameter: inspect.Parameter) -> list[Any]:
    default = parameter.default
    if dataclasses.is_dataclass(component):
        field = next(field for field in dataclasses.fields(component) if field.name == parameter.name)
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
    if default is parameter.empty or isinstance(default, type):
        return []  # a config cannot contain classes
    return [str(default).removeprefix("torch.") if type(default).__module__ == "torch" else default]


def guide(described: dict[str, Any]) -> str:
    """Return the guide's page with the table of names; the first line of a docstring describes each part."""
    rows = []
    for kind, groups in TORCHRL_GROUPS.items():
        named = ", ".join(f"`{group}`" for group in groups)
        for target, part in described.items():
            if part["group"] == kind:
                name, summary = target.rpartition(".")[2], _summary(imported(target))
                rows.append(f"| {named} | `{part['name']}` (`{name}`) | {summary} |\n")
    before, _, rest = GUIDE.read_text().partition(HEAD)
    return before + HEAD + "".join(rows) + "\n" + rest.partition("\n\n")[2]


def reference() -> dict[Path, str]:
    """Return the pages of the reference with the names of each folder. The site builder inserts the docstrings."""
    pages: dict[str, list[str]] = {}
    for name, module in sorted(exports().items()):
        place = exports(module)[name] if (PACKAGE / module.rpartition(".")[2]).is_dir() else module
        pages.setdefault(module.rpartition(".")[2], []).append(f"::: {place}.{name}\n")
    return {REFERENCE / f"{folder}.md": "\n".join([f"# {folder}\n", *found]) for folder, found in pages.items()}


def pages_with_settings() -> dict[Path, str]:
    """Return the guide's pages with marks, with the tables of settings between the marks."""
    pages = {path: path.read_text() for path in sorted(GUIDE.parent.glob("*.md"))}
    return {
        path: MARKED_SETTINGS.sub(lambda match: f"{match[1]}{settings_table(match[2])}{match[4]}", page)
        for path, page in pages.items()
        if MARKED_SETTINGS.search(page)
    }


def settings_table(option: str) -> str:
    """Return a table of the settings of a learner, such as ``model/ppo``, or of a buffer, such as ``data/gae``."""
    path = CONF / f"{option}.yaml"
    if option.startswith("data/"):
        (buffer,) = re.findall(
            r"^  - /torchrl_lightning/schema/buffer/(\w+)@buffer$", path.read_text(), flags=re.MULTILINE
        )
        parts = json.loads(DATA.read_text()).items()
        target = next(target for target, part in parts if (part["group"], part["name"]) == ("buffer", buffer))
        values, comments = yaml_settings(path, "  ", "buffer")
    else:
        values, comments = yaml_settings(path)
        target = values.pop("_target_")
    documented = documented_arguments(imported(target))
    # A run passes the learner to the buffer, so the comments of the config describe its defaults better.
    meanings = {**documented, **comments} if option.startswith("data/") else {**comments, **documented}
    prefix = "data.buffer." if option.startswith("data/") else "model."
    rows = [
        f"| `{prefix}{name}` | `{value}` | {_markdown(meanings.get(name, ''))} |\n"
        for name, value in values.items()
        if value
    ]
    return "".join(["| setting | default | meaning |\n| --- | --- | --- |\n", *rows])


def yaml_settings(path: Path, indent: str = "", block: str = "") -> tuple[dict[str, str], dict[str, str]]:
    """Return the values and the comments of a config or of one of its blocks, including its base configs."""
    text = path.read_text()
    values, comments = {}, {}
    for base in re.findall(r"^  - (?!_self_|/torchrl_lightning/schema)([\w/]+)(?:@_here_)?$", text, flags=re.MULTILINE):
        file = CONF / f"{base[1:]}.yaml" if base.startswith("/") else path.with_name(f"{base}.yaml")
        base_values, base_comments = yaml_settings(file, indent, block)
        values |= base_values
        comments |= base_comments
    if block:
        found = re.search(rf"^{block}:\n((?:  .*\n|\n)*)", text, flags=re.MULTILINE)
        text = found[1] if found else ""
    for name, value, comment in re.findall(rf"^{indent}(\w+):[ ]?([^#\n]*?)(?:\s+# (.*))?$", text, flags=re.MULTILINE):
        if name not in ("defaults", "_convert_"):
            values[name] = value
            comments |= {name: comment} if comment else {}
    return values, comments


def documented_arguments(component: type) -> dict[str, str]:
    """Return the descriptions of a class's arguments, from its docstring and its bases' docstrings."""
    meanings: dict[str, str] = {}
    for owner in reversed(component.__mro__):
        section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(owner.__doc__ or ""), re.DOTALL | re.MULTILINE)
        entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section[1] if section else "", flags=re.MULTILINE)
        described = {name: re.sub(r"\s+", " ", text) for name, text in entries}
        meanings |= {name: text for name, text in described.items() if not re.match("As in |[Ss]ee |λ", text)}
    return meanings


def _summary(component: type) -> str:
    return _markdown((component.__doc__ or "").partition("\n")[0])


def _markdown(text: str) -> str:
    return re.sub(r"``|\\[()]", "`", re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text)).replace("|", r"\|")


def data(described: dict[str, dict[str, Any]]) -> str:
    """Return the schemas as JSON, each in a few lines."""
    parts = []
    for target, part in described.items():
        head = {key: value for key, value in part.items() if key != "arguments"}
        arguments = wrapped(part["arguments"], '  "arguments": {', "   ")
        parts.append(f' "{target}": {{\n{wrapped(head, "  ", "  ")},\n{arguments}}}}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def wrapped(entries: dict[str, Any], begin: str, indent: str) -> str:
    """Return the entries of a JSON object in full lines that break between entries."""
    texts = (f"{json.dumps(key)}: {json.dumps(value)}".replace(" ", "\0") for key, value in entries.items())
    whole = {"break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(", ".join(texts), 117, initial_indent=begin, subsequent_indent=indent, **whole)
    return "\n".join(lines).replace("\0", " ")


def main() -> None:
    described = dict(parts())
    texts = {**reference(), DATA: data(described), **pages_with_settings(), GUIDE: guide(described)}
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
