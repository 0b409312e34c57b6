"""A hostile config in a checkpoint runs no code and writes no file; the command exits with a one-line error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from kit import hostile
from kit.store import composed, composed_run
from torchrl_lightning import LoadedPolicy, load_policy
from torchrl_lightning._core.trust import check_config, resolve_target
from torchrl_lightning._hydra.paths import CONF_DIR
from torchrl_lightning.cli.evaluate import evaluate
from torchrl_lightning.cli.record import record
from torchrl_lightning.cli.train import train
from torchrl_lightning.deploy.loading import CONFIG

COMMANDS = {"evaluate": evaluate, "record": record, "train": train}
MODELS, DATAS, RECIPES = hostile.models("CANARY"), hostile.datas("CANARY"), hostile.recipes("CANARY")


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, Any]:
    """Return a checkpoint of a run with one rollout, in an environment from a recipe."""
    return hostile.checkpoint_of_a_run(tmp_path_factory.mktemp("stored"))


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """Return the composed config of each command."""
    return {
        "evaluate": composed("evaluate", "ckpt_path=a.ckpt", "histogram=null", "episodes=2"),
        "record": composed("record", "ckpt_path=a.ckpt", "episodes=2", "directory=demos"),
        "train": composed_run("ckpt_path=a.ckpt", "~callbacks", "+callbacks={}", "logger=none", into="run"),
    }


@pytest.fixture
def canary(tmp_path, monkeypatch) -> Path:
    """Yield the path of a file that must not appear. An import of the hostile module also writes it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "canary"
    (tmp_path / f"{hostile.MODULE}.py").write_text(f"open({str(path)!r}, 'w')\ndef function(*_, **__): ...\n")
    yield path
    sys.modules.pop(hostile.MODULE, None)


def check_refused(canary: Path, action: Any, *arguments: Any) -> None:
    """Check that the action raises a one-line error and neither changes a file nor imports the hostile module."""
    sys.modules.pop(hostile.MODULE, None)
    before = {path: path.stat().st_mtime_ns for path in canary.parent.iterdir() if path.name != "__pycache__"}
    with pytest.raises(
        ValueError,
        match=r"a file must not have|which is not a \w+Module|contains no config|complete check|more than 1000000",
    ) as raised:
        action(*arguments)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1500
    after = {path: path.stat().st_mtime_ns for path in canary.parent.iterdir() if path.name != "__pycache__"}
    assert after == before
    assert not canary.exists()
    assert hostile.MODULE not in sys.modules


def check_commands_refuse(canary: Path, settings: dict[str, Any]) -> None:
    for command, task in COMMANDS.items():
        check_refused(canary, task, settings[command])


def save(stored: dict[str, Any], **groups: Any) -> None:
    torch.save({**stored, CONFIG: {**stored[CONFIG], **groups}}, "a.ckpt")


@pytest.mark.parametrize("name", MODELS)
def test_model_of_a_file_runs_nothing(name, stored, settings, canary):
    save(stored, model=hostile.models(str(canary))[name])
    check_refused(canary, load_policy, "a.ckpt")
    check_commands_refuse(canary, settings)


@pytest.mark.parametrize("name", DATAS)
def test_data_of_a_file_run_nothing(name, stored, settings, canary):
    save(stored, data=hostile.datas(str(canary))[name])
    check_commands_refuse(canary, settings)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_of_a_file_runs_nothing(name, stored, canary):
    state = {**stored["OnPolicyDataModule"]}
    recipe = hostile.recipes(str(canary))[name]
    state["fingerprint"] = {**state["fingerprint"], "environment": recipe}
    torch.save({**stored, "OnPolicyDataModule": state}, "a.ckpt")
    check_refused(canary, load_policy("a.ckpt").recipe)
    if set(recipe) == {"id"} and isinstance(recipe["id"], str):
        loaded = load_policy("a.ckpt")
        check_refused(canary, LoadedPolicy(loaded.policy, loaded.specs, environment=recipe["id"]).recipe)


def test_pickle_runs_nothing(settings, canary):
    class Payload:
        def __reduce__(self):
            return exec, (f"open({str(canary)!r}, 'w')",)

    torch.save({"state_dict": {}, CONFIG: Payload()}, "a.ckpt")
    check_refused(canary, load_policy, "a.ckpt")
    check_commands_refuse(canary, settings)


PPOD = {"_target_": "torchrl_lightning.PPODBuffer", "_partial_": True}
RING = {"_target_": "torchrl_lightning.RingStorage", "max_size": 9}
OFFLINE = {"_target_": "torchrl_lightning.ReplayDataModule"}
FOLDERS: dict[str, dict[str, Any]] = {
    "cells on a disk": {"buffer": {**RING, "scratch_dir": "CANARY"}},
    "demonstrations that are written": {"buffer": {**PPOD, "target_agent_demos_dir": "CANARY"}},
    "demonstrations that are read": {"buffer": {**PPOD, "supplementary_demos_dir": "/etc"}},
    "a data set": {**OFFLINE, "dataset": "/etc"},
    "a data set above ours": {**OFFLINE, "dataset": f"{CONF_DIR}/demonstrations/../../x"},
    "a data set of Minari's above its own": {**OFFLINE, "dataset": "minari:../../x"},
    "states of buffers": {**OFFLINE, "buffer_dir": "CANARY"},
}
OWN_MODEL = {**hostile.MODEL, "network": {"_target_": f"{hostile.MODULE}.function", "hidden_sizes": [4]}}


@pytest.fixture
def own_class(canary, stored) -> Path:
    """Store a checkpoint with a network from a user's module; return the canary's path."""
    (canary.parent / f"{hostile.MODULE}.py").write_text("from torchrl_lightning import MLPNetwork as function")
    save(stored, model=OWN_MODEL)
    return canary


@pytest.mark.parametrize("name", FOLDERS)
def test_file_names_no_place_on_the_disk(name, stored, settings, canary):
    data = {**hostile.DATA, **FOLDERS[name]}
    check_refused(canary, lambda: check_config(data, where="the config"))
    check_config(data, where="the config", trusted=True)
    # Playing does not need these folders, so a checkpoint from another machine can be played.
    on_policy = {**data, "_target_": hostile.DATA["_target_"]}
    on_policy.pop("dataset", None), on_policy.pop("buffer_dir", None)
    if on_policy.get("buffer", {}).get("_partial_"):
        save(stored, data=on_policy)
        record(settings["record"])
        assert not canary.exists()


def test_trusting_the_file_is_the_only_way_past(settings, own_class):
    check_commands_refuse(own_class, settings)
    assert load_policy("a.ckpt", trusted=True)
    assert record(OmegaConf.merge(settings["record"], {"trusted": True})) > 0


def test_folder_of_a_run_vouches_for_nothing(settings, own_class):
    (own_class.parent / ".hydra").mkdir()
    (own_class.parent / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml({"model": OWN_MODEL}))
    check_commands_refuse(own_class, settings)


def test_file_may_name_our_classes_that_are_built_from_plain_values():
    import torchrl_lightning

    named = {name for name in torchrl_lightning.__all__ if resolve_target(f"torchrl_lightning.{name}")}
    assert {"PPOModule", "MLPNetwork", "CrossEntropyPlanner", "WorldModelFit", "GoalReward", "OutsideBox"} <= named
    assert not named & {"LastCheckpoint", "BestCheckpoint", "RolloutMetricsLogger", "FramesProgressBar", "load_policy"}
    assert not named & {"DemonstrationDirectory", "read_demonstration", "write_demonstration", "minari_demonstrations"}
