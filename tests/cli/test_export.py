"""The export command writes a policy as a file, and raises errors before it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict.nn import TensorDictModule
from torch import nn

from kit.extras import need_extra
from kit.runs import trainer
from kit.specs import BOX
from torchrl_lightning import LoadedPolicy, OnPolicyDataModule, export_policy, load_policy, save_pretrained
from torchrl_lightning.agents import PPOModule, RecurrentNetwork
from torchrl_lightning.cli.config.instantiate import SaveConfig
from torchrl_lightning.deploy.export import DESCRIPTION_FILE
from torchrl_lightning.deploy.loading import CONFIG

MODEL = {
    "_target_": "torchrl_lightning.PPOModule",
    "_convert_": "all",
    "network": {"_target_": "torchrl_lightning.RecurrentNetwork", "cell": "lstm", "hidden_size": 4},
}
DATA = {"_target_": "torchrl_lightning.OnPolicyDataModule", "env": "Pendulum-v1"}
STATES = {f"{above}recurrent_state.{name}": [1, 4] for above in ("", "next.") for name in "hc"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a recurrent network and normalised observations."""
    path = tmp_path_factory.mktemp("run")
    sizes = {"num_envs": 2, "frames_per_batch": 32, "num_mini_batch": 1, "num_epochs": 1, "seed": 0}
    data = OnPolicyDataModule("Pendulum-v1", normalize_observation=True, **sizes)
    kept = SaveConfig(OmegaConf.create({"data": DATA, "model": MODEL}))
    run = trainer(max_epochs=1, limit_val_batches=0, callbacks=[kept])
    run.fit(PPOModule(RecurrentNetwork("lstm", 4)), datamodule=data)
    run.save_checkpoint(path / "checkpoints" / "last.ckpt")
    return path


def episode(policy: LoadedPolicy, step: Any) -> tuple[list[Any], list[Any]]:
    """Return the actions of a policy and of its exported file for four batches of observations."""
    rng = np.random.default_rng(0)
    shown = [rng.normal(size=(3, 3)).astype(np.float32) for _ in range(4)]
    acted, stepped, states = [], [], [np.zeros((3, 1, 4), np.float32)] * 2
    for observation in shown:
        acted.append(policy.act(observation))
        action, *states = step(observation, *states)
        stepped.append(action)
    return acted, stepped


def test_run_becomes_a_file_that_acts_as_its_policy_does(folder, run):
    said = run("export", str(folder)).stdout
    assert said == (
        f"{folder}/policy.pt2: observation [N, 3] float32, recurrent_state.h [N, 1, 4] float32, recurrent_state.c "
        "[N, 1, 4] float32 -> action [N, 1] float32, next.recurrent_state.h [N, 1, 4] float32, next.recurrent_state.c "
        "[N, 1, 4] float32\n"
    )
    extra = {DESCRIPTION_FILE: ""}
    program = torch.export.load(folder / "policy.pt2", extra_files=extra).module()
    described = json.loads(extra[DESCRIPTION_FILE])
    shapes = {name: each["shape"][1:] for side in described.values() for name, each in side.items()}
    assert shapes == {"observation": [3], "action": [1], **STATES}
    acted, stepped = episode(load_policy(folder), lambda *given: program(*map(torch.as_tensor, given)))
    for mine, theirs in zip(acted, stepped, strict=True):
        np.testing.assert_allclose(theirs.numpy(), mine, rtol=1e-5, atol=1e-6)


def test_onnx_acts_as_the_policy_does(folder, run, tmp_path):
    need_extra("onnx")
    import onnxruntime

    run("export", str(folder / "checkpoints" / "last.ckpt"), "--format", "onnx", "-o", str(tmp_path / "a.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    names = [entry.name for entry in session.get_inputs()]
    assert names == ["observation", "recurrent_state.h", "recurrent_state.c"]
    assert {entry.shape[0] for entry in (*session.get_inputs(), *session.get_outputs())} == {"N"}
    assert [entry.name for entry in session.get_outputs()] == ["action", *(f"next.{name}" for name in names[1:])]
    assert json.loads(session.get_modelmeta().custom_metadata_map[DESCRIPTION_FILE])["inputs"]["observation"][
        "shape"
    ] == [
        "N",
        3,
    ]
    acted, stepped = episode(
        load_policy(folder), lambda *given: session.run(None, dict(zip(names, given, strict=True)))
    )
    np.testing.assert_allclose(np.array(stepped), np.array(acted), rtol=1e-4, atol=1e-6)


def test_operator_that_onnx_lacks_is_named(tmp_path):
    need_extra("onnx")
    refuses(
        tmp_path, lambda seen: torch.special.bessel_j0(seen[..., :2]), r"ONNX has no operator for .*bessel_j0", "onnx"
    )


def refuses(tmp_path: Path, act: Any, message: str, form: str = "torch") -> None:
    """Check that the export raises a one-line error and does not change the existing file."""

    class Acting(nn.Module):
        def forward(self, seen: torch.Tensor) -> torch.Tensor:
            return act(seen)

    path = tmp_path / "policy.pt2"
    path.write_text("before")
    policy = LoadedPolicy(TensorDictModule(Acting(), in_keys=["observation"], out_keys=["action"]), BOX)
    with pytest.raises(ValueError, match=message) as raised:
        export_policy(policy, path, format=form)
    assert "\n" not in str(raised.value)
    assert [each.name for each in tmp_path.iterdir()] == ["policy.pt2"]
    assert path.read_text() == "before"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda seen: torch.rand_like(seen[..., :2]), "'action' for .* draws random numbers"),
        (lambda seen: torch.full((len(seen), 2), float(seen.sum())), "cannot be traced by torch.export: "),
    ],
)
def test_unsupported_export_exits_with_one_line_and_writes_nothing(act, message, tmp_path):
    refuses(tmp_path, act, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere"],
            "error: nowhere: file or folder not found; name a run, a checkpoint or a published",
        ),
        (["."], "error: . has neither checkpoints/best.ckpt nor checkpoints/last.ckpt. Use a run, or a checkpoint"),
    ],
)
def test_mistake_is_one_line(arguments, message, run):
    said = run("export", *arguments, expect=1).stderr
    assert said.startswith(message)
    assert len(said.splitlines()) == 1


def test_refused_class_names_the_trust_option_of_this_command(folder, run, tmp_path):
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)
    stored[CONFIG]["model"]["network"] = {"_target_": "own.Class"}
    torch.save(stored, tmp_path / "theirs.ckpt")
    said = run("export", "theirs.ckpt", expect=1).stderr
    assert "'own.Class' is none of the classes" in said
    assert said.endswith("if you trust its author, set --trusted.\n")


def test_missing_extra_is_named(folder, run, monkeypatch, tmp_path):
    monkeypatch.setattr("torchrl_lightning.deploy.export.find_spec", lambda name: None)
    save_pretrained(folder, tmp_path / "published")
    said = run("export", "published", "--format", "onnx", expect=1).stderr
    assert (
        said == "error: format=onnx needs onnx and onnxruntime and onnxscript: pip install 'torchrl-lightning[onnx]'\n"
    )
