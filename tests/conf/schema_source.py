"""Write the torch-free schemas from the constructors that they describe: ``python tests/conf/schema_source.py``.

A field is an argument of a constructor, with its type as far as OmegaConf can check it and its default.
"""

from __future__ import annotations

import dataclasses
import subprocess
import typing
from pathlib import Path
from typing import Any

import lightning
from omegaconf import MISSING

import torchrl_lightning
from torchrl_lightning._fields import config_fields

FOLDER = Path(torchrl_lightning.__file__).parent / "_schemas"

# What a DataModule hands over itself, or knows better than a config: the shape of its rollouts and mini-batches.
ON_POLICY = {
    *("size", "actor", "algorithm", "envs", "critic", "intrinsic_critic", "generator"),
    *("num_envs", "time_dim"),
}
REPLAY = {"num_envs", "generator", "shared"}
# For programs that bring functions of their own.
RARE = {"collate_fn"}
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
    recursive: bool = True  # whether Hydra builds what it finds inside, or the class does so itself

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
            Described("data", "dynamics", "DynamicsDataModule"),
            Described("env", "recipe", "EnvironmentRecipe", recursive=False),
        ],
    ),
    "buffers": (
        "buffers and their parts",
        [
            _buffer("vanilla", "VanillaOnPolicyBuffer", {*ON_POLICY, "batch_size"}),
            _buffer("gae", "GAEBuffer", {*ON_POLICY, "batch_size"}),
            _buffer("vtrace", "VTraceBuffer", {*ON_POLICY, "batch_size"}),
            _buffer("ppod", "PPODBuffer", {*ON_POLICY, "batch_size"}),
            _buffer("ppo", "PPOBuffer", ON_POLICY),
            _buffer("experience", "ExperienceBuffer", {*REPLAY, *RARE, "batch_size"}),
            _buffer("recurrent", "RecurrentReplayBuffer", {*REPLAY, "batch_size"}),
            _buffer("simple", "SimpleReplayBuffer", REPLAY),
            _buffer(
                "model_based",
                "MBReplayBuffer",
                {*ON_POLICY - {"size", "critic", "intrinsic_critic", "time_dim"}, "batch_size"},
            ),
            Described("storage", "ring", "RingStorage"),
            Described("storage", "frame", "FrameStorage"),
            # The buffer has the generator.
            Described("sampler", "uniform", "UniformSampler", frozenset({"generator"})),
            Described("sampler", "prioritized", "PrioritizedSampler", frozenset({"generator"})),
            Described("sampler", "sequence", "SequenceSampler", frozenset({"generator"})),
            Described("sampler", "recent", "RecentSampler", frozenset({"generator"})),
            Described("transform", "hindsight", "HindsightRelabel"),
            Described("source", "branched", "BranchedReplay", frozenset({"buffer"}), partial=True),
        ],
    ),
    "models": (
        "LightningModules and networks",
        [
            Described("model", "a2c", "A2CModule"),
            Described("model", "dqn", "DQNModule"),
            Described("model", "loss_module", "LossModuleAgent"),
            Described("model", "mbpo", "MBPOModule"),
            Described("model", "pets", "DynamicsEnsemble"),
            Described("model", "ppo", "PPOModule"),
            Described("model", "reinforce", "ReinforceModule"),
            Described("model", "sac", "SACModule"),
            Described("model", "td3", "TD3Module"),
            Described("model", "vtrace", "VTraceModule"),
            Described("network", "mlp", "MLPNetwork"),
            Described("network", "cnn", "CNNNetwork"),
            Described("network", "recurrent", "RecurrentNetwork"),
            Described("intrinsic", "rnd", "RandomNetworkDistillation"),
            Described("dynamics", "world_model", "WorldModelFit"),
            Described("planner", "cem", "CrossEntropyPlanner", frozenset({"env"}), partial=True),
            Described("planner", "random_shooting", "RandomShootingPlanner", frozenset({"env"}), partial=True),
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


def field_source(name: str, kind: Any, default: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).removeprefix("typing.")
    if isinstance(default, list):
        value = f"field(default_factory=lambda: {default!r})" if default else "field(default_factory=list)"
    else:
        value = "MISSING" if default == MISSING else repr(default)
    return f"    {name}: {text} = {value}\n"


def class_source(described: Described) -> str:
    rest = " that a DataModule does not fill in itself" if described.partial else ""
    return (
        f'@dataclass\nclass {described.class_name}:\n    """Arguments of :class:`{described.target}`{rest}."""\n\n'
        f'    _target_: str = "{described.target}"\n'
        + '    _convert_: str = "all"\n'
        + ("    _partial_: bool = True\n" if described.partial else "")
        + ("" if described.recursive else "    _recursive_: bool = False\n")
        + "".join(field_source(*each) for each in config_fields(described.type, described.left_out))
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
