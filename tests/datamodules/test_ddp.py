from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configs.processes import environment

HERE = Path(__file__).parent


def start(folder):
    env = environment()
    env["PYTHONPATH"] = f"{HERE}:{env['PYTHONPATH']}"
    command = [sys.executable, str(HERE / "ddp_run.py"), str(folder)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Folder of an uninterrupted run, of half a run, and of its resumption, on two ranks each."""
    folder = tmp_path_factory.mktemp("ddp")
    done = start(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def reports(folder, name):
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_has_experience_of_its_own_and_the_same_parameters(two_ranks):
    first, second = reports(two_ranks, "whole")
    assert first["seed"] != second["seed"]
    assert first["observations"] != second["observations"]
    assert first["updates"] == second["updates"] == 3 * 4
    assert first["frames"] == second["frames"] == 3 * 32 * 2
    assert first["parameters"] == second["parameters"]


def test_a_checkpoint_holds_the_states_of_all_ranks(two_ranks):
    states = torch.load(two_ranks / "half.ckpt", weights_only=True)["OnPolicyDataModule"]["ranks"]
    assert [state["frames"] for state in states] == [128, 128]
    first, second = (state["buffer"] for state in states)
    assert str(first) != str(second)


def test_two_ranks_go_on_as_if_never_stopped(two_ranks):
    for whole, resumed in zip(reports(two_ranks, "whole"), reports(two_ranks, "resumed"), strict=True):
        assert resumed["frames"] == whole["frames"]
        assert resumed["parameters"] == whole["parameters"]


def test_resuming_on_one_rank_is_refused(two_ranks, make_data, make_trainer, make_module):
    data = make_data(num_envs=2, frames_per_batch=32, mini_batch_size=16)
    with pytest.raises(ValueError, match=r"of 2 rank\(s\), but this run has 1. Resume with 2 device\(s\)"):
        make_trainer().fit(make_module(), datamodule=data, ckpt_path=two_ranks / "half.ckpt")
