"""If a run's collector clips actions, evaluations and the exported policy clip them also."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from cli.commands import last_line
from kit.clipped import SPACES

OWN = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from kit.clipped import FarActorCritic, Strict as make
"""
RUN = [
    *("~experiment", "data=gae", "~model", "+model._target_=own_far.FarActorCritic"),
    "data.env={_target_:hydra.utils.get_method,path:own_far.make}",
    "+data.collector={_target_:torchrl_lightning.GymnasiumCollector,_partial_:true,clip_actions:true}",
    *("data.num_envs=2", "data.frames_per_batch=16", "data.mini_batch_size=8", "data.num_epochs=1"),
    *("data.total_frames=32", "data.eval_episodes=2", "eval_episodes=2", "logger=none", "hydra.run.dir=first"),
]


def test_clip_actions_of_a_collector_holds_in_all_commands(run, tmp_path):
    (tmp_path / "own_far.py").write_text(OWN)
    assert last_line(run("train", *RUN).stdout)[1] == "3.000"
    played = ["evaluate", "ckpt_path=first", "episodes=2", "histogram=null", "hydra.run.dir=second", "trusted=true"]
    assert last_line(run(*played).stdout)[1] == "3.000"
    run("export", "first", "--output", "policy.pt2", "--trusted")
    program = torch.export.load(tmp_path / "policy.pt2").module()
    for action in program(torch.zeros(4, 3)).numpy():
        assert SPACES["float32"].contains(np.asarray(action))
