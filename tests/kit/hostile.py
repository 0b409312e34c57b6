"""Configs that an attacker puts into a checkpoint to run code, to write or read files, or to fill the memory."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from kit.runs import trainer
from torchrl_lightning import EnvironmentRecipe, MLPNetwork, OnPolicyDataModule, PPOModule
from torchrl_lightning._core.checksums import CHECKSUMS_KEY
from torchrl_lightning.deploy.loading import CONFIG

MODULE = "hostile_module"  # the test defines the effect of its import
RECIPE = "torchrl_lightning.EnvironmentRecipe"
MODEL = {
    "_target_": "torchrl_lightning.PPOModule",
    "_convert_": "all",
    "network": {"_target_": "torchrl_lightning.MLPNetwork", "hidden_sizes": [4]},
}
DATA = {
    "_target_": "torchrl_lightning.OnPolicyDataModule",
    "_convert_": "all",
    "env": {"_target_": RECIPE, "_convert_": "all", "_recursive_": False, "id": "CartPole-v1"},
    "num_envs": 2,
    "frames_per_batch": 16,
    "num_mini_batch": 1,
    "num_epochs": 1,
    "seed": 0,
}


class _Keeps(Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[CONFIG] = {"data": DATA, "model": MODEL}


def checkpoint_of_a_run(folder: Path) -> dict[str, Any]:
    """Return the checkpoint of a run of one rollout, without its checksums, as an attacker would store it."""
    arguments = {name: value for name, value in DATA.items() if name[0] != "_"}
    data = OnPolicyDataModule(**{**arguments, "env": EnvironmentRecipe("CartPole-v1")})
    run = trainer(max_epochs=1, limit_val_batches=0, callbacks=[_Keeps()])
    run.fit(PPOModule(MLPNetwork([4])), datamodule=data)
    run.save_checkpoint(folder / "a.ckpt")
    stored = torch.load(folder / "a.ckpt", weights_only=True)
    del stored[CHECKSUMS_KEY]
    return stored


def changed(config: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """Return a copy of a config with another value at ``a.b.c``."""
    made = copy.deepcopy(config)
    node = made
    *folders, last = place.split(".")
    for folder in folders:
        node = node.setdefault(folder, {})
    node[last] = value
    return made


def models(canary: str) -> dict[str, Any]:
    """Return model configs by the name of their fault. If the config's code runs, it writes the canary."""
    command = f"touch {canary}"
    system = {"_target_": "os.system", "command": command}
    target = {
        "a function of os": system,
        "a process": {"_target_": "subprocess.run", "args": ["touch", canary]},
        "a process, opened": {"_target_": "subprocess.Popen", "args": ["touch", canary]},
        "posix itself": {"_target_": "posix.system", "command": command},
        "eval": {"_target_": "builtins.eval", "_args_": [f"open({canary!r}, 'w')"]},
        "exec": {"_target_": "builtins.exec", "_args_": [f"open({canary!r}, 'w')"]},
        "open": {"_target_": "builtins.open", "file": canary, "mode": "w"},
        "a path": {"_target_": "pathlib.Path.touch", "_args_": [canary]},
        "a log": {"_target_": "logging.FileHandler", "filename": canary},
        "a copy": {"_target_": "shutil.copyfile", "src": "/etc/hostname", "dst": canary},
        "an array": {"_target_": "numpy.save", "file": canary, "arr": [1]},
        "a tensor": {"_target_": "torch.save", "obj": 1, "f": canary},
        "a pickle": {"_target_": "torch.load", "f": canary, "weights_only": False},
        "the hub": {"_target_": "torch.hub.load", "repo_or_dir": canary, "model": "x", "source": "local"},
        "an extension": {"_target_": "torch.utils.cpp_extension.load", "name": "x", "sources": [canary]},
        "a script": {"_target_": "runpy.run_path", "path_name": canary},
        "a module": {"_target_": "importlib.import_module", "name": MODULE},
        "a function of a module": {"_target_": f"{MODULE}.function"},
        "Hydra again": {"_target_": "hydra.utils.instantiate", "config": system, "_recursive_": False},
        "a method by Hydra": {"_target_": "hydra.utils.get_method", "path": f"{MODULE}.function"},
        "a partial": {"_target_": "functools.partial", "_args_": [system]},
        "a function of ours": {"_target_": "torchrl_lightning.write_demonstration", "path": canary},
        "a function of ours, deep": {
            "_target_": "torchrl_lightning._core.files.write_state",
            "folder": canary,
            "state": {},
        },
        "what a module of ours imports": {"_target_": "torchrl_lightning._core.files.os.system", "command": command},
        "what a class of ours has": {"_target_": "torchrl_lightning.PPOModule.load_from_checkpoint"},
        "a callback of ours": {"_target_": "torchrl_lightning.LastCheckpoint", "dirpath": canary},
        "a checkpoint of ours": {"_target_": "torchrl_lightning.BestCheckpoint", "dirpath": canary},
        "a logger": {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": canary},
        "a trainer": {"_target_": "lightning.Trainer", "default_root_dir": canary},
        "an environment": {"_target_": "gymnasium.make", "id": f"{MODULE}:X-v0"},
        "a wrapper that records": {"_target_": "gymnasium.wrappers.RecordVideo", "video_folder": canary},
        "a transform that loads": {"_target_": "torchrl.envs.R3MTransform", "model_name": "resnet18"},
        "a schedule of callables": {"_target_": "torch.optim.lr_scheduler.LambdaLR", "lr_lambda": system},
        "a loss of callables": {"_target_": "torch.nn.TripletMarginWithDistanceLoss", "distance_function": system},
        "no name": {"_target_": ["os", "system"]},
        "a name in a mapping": {"_target_": {"_target_": "os.system"}},
        "a name without a module": {"_target_": "system"},
        "an empty name": {"_target_": ""},
        "a collector that starts processes": {
            "_target_": "torchrl_lightning.AsynchronousCollector",
            "env": "CartPole-v1",
            "policy": {"_target_": "torch.nn.Identity"},
            "frames_per_batch": 1,
        },
    }
    found = {f"optimizer: {name}": changed(MODEL, "optimizer", node) for name, node in target.items()}
    found |= {
        "at the top": system,
        "no learner": {"_target_": "torch.nn.Linear", "in_features": 100_000, "out_features": 100_000},
        "no mapping": [system],
        "in a list": changed(MODEL, "optimizer", [[system]]),
        "in positional arguments": changed(MODEL, "network._args_", [system]),
        "below what is not recursive": changed(MODEL, "optimizer", {"_recursive_": False, "x": system}),
        "in a partial": changed(MODEL, "optimizer", {**system, "_partial_": True}),
        "in a tuple": changed(MODEL, "optimizer", (system,)),
        "in a tuple in a list": changed(MODEL, "network.hidden_sizes", [(system,)]),
        "in an ordered dict": changed(MODEL, "optimizer", OrderedDict(system)),
        "in a set": changed(MODEL, "optimizer", {"os.system"}),
        "a tensor": changed(MODEL, "network.hidden_sizes", torch.tensor([4])),
        "a complex number": changed(MODEL, "learning_rate", 1j),
        "bytes": changed(MODEL, "schedule", bytearray(b"x")),
        "an interpolation": changed(
            MODEL, "optimizer", f"${{oc.create:{{_target_:logging.FileHandler,filename:{canary}}}}}"
        ),
        "an interpolation of the shell": changed(MODEL, "schedule", "${oc.env:HOME}"),
        "an interpolation in a list": changed(MODEL, "network.hidden_sizes", ["${oc.decode:4}"]),
        "an interpolated target": changed(MODEL, "optimizer", {"_target_": "${oc.decode:os.system}"}),
        "an interpolated name": changed(MODEL, "optimizer", {"${oc.env:HOME}": 1}),
        "an escaped interpolation": changed(MODEL, "schedule", "\\${oc.env:HOME}"),
        "an unknown directive": changed(MODEL, "_self_", system),
        "a directive of another type": changed(MODEL, "network._partial_", "yes"),
        "a conversion that is none": changed(MODEL, "_convert_", "objects"),
        "a number of many digits": changed(MODEL, "learning_rate", 1 << 70),
        "a long text": changed(MODEL, "schedule", "x" * 5000),
        "a long name": changed(MODEL, "x" * 5000, 1),
        "many values": changed(MODEL, "network.hidden_sizes", [4] * 30_000),
        "many levels": changed(MODEL, "optimizer", _nested(system, 40)),
        "a circle": changed(MODEL, "optimizer", _circle()),
        "shared lists that unfold": changed(MODEL, "optimizer", _unfolding()),
        "a number as a name": changed(MODEL, "optimizer", {1.5: system}),
    }
    return found


def recipes(canary: str) -> dict[str, dict[str, Any]]:
    """Return settings of a recipe by the name of their fault."""
    base = {"id": "CartPole-v1"}
    wrapper = {
        "a function": {"_target_": "os.system", "command": f"touch {canary}"},
        "what records": {"_target_": "gymnasium.wrappers.RecordVideo", "video_folder": canary},
        "a callable": {"_target_": "gymnasium.wrappers.TransformObservation", "func": "print"},
        "a module's": {"_target_": f"{MODULE}.function"},
        "no wrapper of ours": {"_target_": "torchrl_lightning.RingStorage", "max_size": 3},
        "what calls": {"_target_": "torchrl.envs.EndOfLifeTransform", "eol_attribute": "lib.logger.error"},
        "what connects": {"_target_": "torchrl.envs.RayTransform"},
    }
    gym = {"_target_": "torchrl.envs.GymEnv"}
    return {
        **{f"wrapper: {name}": {**base, "wrappers": [each]} for name, each in wrapper.items()},
        "wrappers in a tuple": {**base, "wrappers": (wrapper["a function"],)},
        "an id that imports": {"id": f"{MODULE}:X-v0"},
        "an id that imports one of two": {"id": f"minigrid:{MODULE}:X-v0"},
        "a module that is imported": {"id": "X-v0", "module": MODULE},
        "a module in a list": {"id": "X-v0", "module": ["minigrid", MODULE]},
        "a module behind one of ours": {"id": "X-v0", "module": f"minigrid:{MODULE}"},
        "a function for an id": {"id": {"_target_": "os.system", "command": f"touch {canary}"}},
        "a class for an id": {"id": {"_target_": f"{MODULE}.function"}},
        "a recipe in a recipe": {"id": {"_target_": RECIPE, "id": f"{MODULE}:X-v0"}},
        "a plain recipe in a recipe": {"id": {"_target_": RECIPE, "id": "CartPole-v1"}},
        "TorchRL's by a module": {"id": {**gym, "env_name": f"{MODULE}:X-v0"}},
        "TorchRL's by a module, apart": {"id": gym, "env_kwargs": {"env_name": f"{MODULE}:X-v0"}},
        "TorchRL's by position": {"id": {**gym, "_args_": [f"{MODULE}:X-v0"]}},
        "TorchRL's with another library": {"id": {**gym, "env_name": "CartPole-v1", "backend": MODULE}},
        "TorchRL's with another library, apart": {"id": gym, "env_kwargs": {"env_name": "X-v0", "backend": MODULE}},
        "a file of a model": {"id": "HalfCheetah-v5", "env_kwargs": {"xml_file": canary}},
        "a file of a model at home": {"id": "HalfCheetah-v5", "env_kwargs": {"xml_file": "~secret"}},
        "an old id that imports": {"id": "GymV21Environment-v0", "env_kwargs": {"env_id": f"{MODULE}:X-v0"}},
        "an interpolation": {"id": "${oc.env:HOME}"},
    }


def datas(canary: str) -> dict[str, Any]:
    """Return configs of a DataModule by the name of their fault."""
    system = {"_target_": "os.system", "command": f"touch {canary}"}
    return {
        **{f"recipe: {name}": changed(DATA, "env", {**DATA["env"], **each}) for name, each in recipes(canary).items()},
        "an id that imports": changed(DATA, "env", f"{MODULE}:X-v0"),
        "an id of evaluation that imports": changed(DATA, "eval_env", f"{MODULE}:X-v0"),
        "a collector": changed(DATA, "collector", system),
        "a collector of an environment that imports": changed(
            DATA,
            "collector",
            {"_target_": "torchrl_lightning.GymnasiumCollector", "_partial_": True, "env": f"{MODULE}:X-v0"},
        ),
        "a buffer": changed(DATA, "buffer", {"_target_": f"{MODULE}.function", "_partial_": True}),
        "no stream": system,
        "no stream of ours": {"_target_": "torch.nn.Linear", "in_features": 100_000, "out_features": 100_000},
    }


def _nested(node: Any, depth: int) -> Any:
    for _ in range(depth):
        node = {"x": node}
    return node


def _circle() -> dict[str, Any]:
    circle: dict[str, Any] = {}
    circle["x"] = circle
    return circle


def _unfolding() -> list[Any]:
    node: list[Any] = ["x"]
    for _ in range(30):
        node = [node, node]
    return node
