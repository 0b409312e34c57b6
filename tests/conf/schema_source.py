"""Write the torch-free schemas from the constructors that they describe: ``python tests/conf/schema_source.py``.

A field is an argument of a constructor, with its type as far as OmegaConf can check it and its default.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch

import torchrl_lightning

FOLDER = Path(torchrl_lightning.__file__).parent / "_schemas"
PRIMITIVES = (bool, int, float, str)

# What a DataModule hands over itself, or knows better than a config: the shape of its rollouts and mini-batches.
ON_POLICY = {
    *("size", "actor", "algorithm", "envs", "critic", "intrinsic_critic", "generator"),
    *("num_envs", "time_dim"),
}
REPLAY = {"num_envs", "generator", "shared"}
# What TorchRL offers to programs that bring functions of their own or keep a buffer in another process.
RARE = {
    *("collate_fn", "transform_factory", "dim_extend", "checkpointer", "consume_after_n_samples"),
    *("compilable", "delayed_init", "transport", "transport_options"),
}
# The groups `callbacks` and `logger` have configs of their own.
TRAINER = {"callbacks", "logger"}


@dataclasses.dataclass(frozen=True)
class Described:
    """One schema: the class that it describes, and which arguments a config does not give."""

    group: str
    name: str
    component: str
    left_out: frozenset[str] = frozenset()
    partial: bool = False

    @property
    def target(self) -> str:
        return self.component if "." in self.component else f"torchrl_lightning.{self.component}"

    @property
    def type(self) -> type:
        module = lightning if self.target.startswith("lightning.") else torchrl_lightning
        found: type = getattr(module, self.target.rpartition(".")[2])
        return found

    @property
    def class_name(self) -> str:
        return self.target.rpartition(".")[2].removesuffix("Module") + "Schema"


def _buffer(name: str, component: str, left_out: set[str]) -> Described:
    return Described("buffer", name, component, frozenset(left_out), partial=True)


MODULES: dict[str, tuple[str, list[Described]]] = {
    "data": (
        "DataModules",
        [
            Described("data", "on_policy", "OnPolicyDataModule"),
            Described("data", "replay", "ReplayDataModule"),
            Described("env", "factory", "EnvironmentFactory"),
        ],
    ),
    "buffers": (
        "buffers and their parts",
        [
            _buffer("vanilla", "VanillaOnPolicyBuffer", {*ON_POLICY, "batch_size"}),
            _buffer("gae", "GAEBuffer", {*ON_POLICY, "batch_size"}),
            _buffer("vtrace", "VTraceBuffer", {*ON_POLICY, "batch_size"}),
            _buffer("ppo", "PPOBuffer", ON_POLICY),
            _buffer("experience", "ExperienceBuffer", {*REPLAY, *RARE, "batch_size"}),
            _buffer("recurrent", "RecurrentReplayBuffer", {*REPLAY, "batch_size"}),
            _buffer("simple", "SimpleReplayBuffer", REPLAY),
            Described("storage", "ring", "RingStorage", frozenset({"compilable"})),
            # The buffer has the generator; a dtype has no name in YAML.
            Described("sampler", "uniform", "UniformSampler", frozenset({"generator"})),
            Described("sampler", "prioritized", "PrioritizedSampler", frozenset({"generator", "dtype"})),
            Described("sampler", "sequence", "SequenceSampler", frozenset({"generator"})),
        ],
    ),
    "models": (
        "LightningModules and networks",
        [
            Described("model", "a2c", "A2CModule"),
            Described("model", "dqn", "DQNModule"),
            Described("model", "ppo", "PPOModule"),
            Described("model", "reinforce", "ReinforceModule"),
            Described("model", "sac", "SACModule"),
            Described("model", "td3", "TD3Module"),
            Described("model", "vtrace", "VTraceModule"),
            Described("network", "mlp", "MLPNetwork"),
            Described("network", "cnn", "CNNNetwork"),
            Described("network", "recurrent", "RecurrentNetwork"),
            Described("intrinsic", "rnd", "RandomNetworkDistillation"),
        ],
    ),
    "trainer": ("trainer", [Described("trainer", "trainer", "lightning.Trainer", frozenset(TRAINER))]),
    "callbacks": (
        "callbacks",
        [
            Described("callback", "best_checkpoint", "BestCheckpoint"),
            Described("callback", "experience_log", "ExperienceLog"),
            Described("callback", "frames_bar", "FramesProgressBar"),
            Described("callback", "last_checkpoint", "LastCheckpoint"),
        ],
    ),
}


def checked_type(annotation: Any) -> str:
    """The type that OmegaConf checks for an annotation; ``Any`` where it cannot, e.g. for keys and factories.

    Example:
        >>> checked_type(float | None), checked_type(Sequence[int]), checked_type(torch.device | str)
        ('float | None', 'list[int]', 'str')
    """
    if annotation in PRIMITIVES:
        return str(annotation.__name__)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        kinds = {type(each).__name__ for each in arguments}
        return kinds.pop() if len(kinds) == 1 else "Any"
    if origin in (list, Sequence, tuple):
        if origin is tuple and arguments[1:] != (...,):
            return "Any"
        return f"list[{arguments[0].__name__}]" if arguments[0] in PRIMITIVES else "Any"
    if origin in (typing.Union, types.UnionType):
        # Both are written as texts.
        members = [each for each in arguments if each not in (type(None), torch.device, Path)]
        texts = list(dict.fromkeys(checked_type(each) for each in members))
        if "Any" in texts or (len(texts) > 1 and any("[" in text for text in texts)):
            return "Any"
        return " | ".join(texts + ["None"] * (type(None) in arguments))
    return "Any"


def annotation_of(component: type, parameter: inspect.Parameter) -> Any:
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    try:
        return eval(parameter.annotation, component.__init__.__globals__)
    except NameError:  # imported for type checkers alone
        return Any


def default_of(component: type, parameter: inspect.Parameter) -> Any:
    if dataclasses.is_dataclass(component):
        field = next(field for field in dataclasses.fields(component) if field.name == parameter.name)
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
    return parameter.default


def field_source(component: type, parameter: inspect.Parameter) -> str:
    kind, default = checked_type(annotation_of(component, parameter)), default_of(component, parameter)
    if default is parameter.empty or isinstance(default, type):
        value = "MISSING"  # a config has no classes
    elif isinstance(default, list | tuple) and not default:
        value = "field(default_factory=list)"
    elif isinstance(default, list | tuple):
        value = f"field(default_factory=lambda: {list(default)!r})"
    else:
        value = repr(default)
    return f"    {parameter.name}: {kind} = {value}\n"


def class_source(described: Described) -> str:
    parameters = inspect.signature(described.type).parameters
    if not described.left_out <= set(parameters):
        raise ValueError(f"{described.component} takes no {described.left_out - set(parameters)}.")
    rest = " that a DataModule does not fill in itself" if described.partial else ""
    return (
        f'@dataclass\nclass {described.class_name}:\n    """Arguments of :class:`{described.target}`{rest}."""\n\n'
        f'    _target_: str = "{described.target}"\n'
        + '    _convert_: str = "all"\n'
        + ("    _partial_: bool = True\n" if described.partial else "")
        + "".join(
            field_source(described.type, parameter)
            for parameter in parameters.values()
            if parameter.name not in described.left_out
        )
    )


def module_source(name: str) -> str:
    title, schemas = MODULES[name]
    classes = "\n\n".join(class_source(each) for each in schemas)
    table = "".join(f'    ("{each.group}", "{each.name}"): {each.class_name},\n' for each in schemas)
    dataclass = "dataclass, field" if "field(" in classes else "dataclass"
    missing = "\nfrom omegaconf import MISSING\n" if "MISSING" in classes else ""
    source = (
        f'"""Schemas of the {title}. Generated from the constructors by ``tests/conf/schema_source.py``."""\n\n'
        f"from __future__ import annotations\n\nfrom dataclasses import {dataclass}\nfrom typing import Any\n{missing}"
        f"\n\n{classes}\n\nSCHEMAS: dict[tuple[str, str], Any] = {{\n{table}}}\n"
    )
    command = ["ruff", "format", "--no-cache", "--line-length=120", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for name in MODULES:
        (FOLDER / f"{name}.py").write_text(module_source(name))
