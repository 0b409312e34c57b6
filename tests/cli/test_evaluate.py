from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest
import torch

from cli.commands import last_line
from kit.demonstrations import recorded


def test_checkpoint_is_played_and_its_returns_drawn(trained, run, tmp_path):
    checkpoint = trained[0] / "checkpoints" / "last.ckpt"
    command = ["evaluate", f"ckpt_path={checkpoint}", "episodes=5", "hydra.run.dir=run"]
    match = last_line(run(*command).stdout)
    assert (match[3], match[4]) == ("5", "512")
    assert (tmp_path / "run" / "returns.png").read_bytes().startswith(b"\x89PNG")
    # A checkpoint also works outside the folder of its run.
    shutil.copy(checkpoint, tmp_path / "lonely.ckpt")
    lonely = ["evaluate", "ckpt_path=lonely.ckpt", "episodes=5", "hydra.run.dir=run", "histogram=null"]
    assert last_line(run(*lonely, "deterministic=false", "seed=5").stdout)[1] != match[1]


@pytest.mark.parametrize(
    "kind",
    [
        ["data=offline", "model=discrete_iql"],
        ["data=uniform", "data.dataset_share=0.5", "data.warmup_frames=16", "env=cartpole", "model=dqn"],
    ],
    ids=["alone", "a share of each batch"],
)
def test_offline_policy_is_played_without_its_data(kind, run, tmp_path):
    recorded(tmp_path / "shown")
    tiny = ["model.network.hidden_sizes=[8]", "data.batch_size=16", "data.updates_per_epoch=4"]
    end = ["trainer.max_epochs=1", "data.eval_episodes=1", "eval_episodes=1", "logger=none", "hydra.run.dir=learnt"]
    run("train", "~experiment", "data.dataset=shown", *kind, *tiny, *end)
    shutil.rmtree(tmp_path / "shown")
    played = ["evaluate", "ckpt_path=learnt", "episodes=2", "hydra.run.dir=run", "histogram=null"]
    assert last_line(run(*played).stdout)[3] == "2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: no checkpoint given; set ckpt_path=RUN, or ckpt_path=RUN/checkpoints/last.ckpt."),
        (["ckpt_path=nowhere.ckpt"], "error: ckpt_path=nowhere.ckpt is not a file"),
        (["ckpt_path=."], "error: ckpt_path=. has neither checkpoints/best.ckpt nor checkpoints/last.ckpt. Use a run"),
        (["ckpt_path=other.ckpt"], "error: other.ckpt contains no config"),
        (["episode=5"], "error: episode: unknown setting; did you mean episodes?"),
    ],
)
def test_mistake_is_named(arguments, message, run, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    done = run("evaluate", *arguments, "hydra.run.dir=run", expect=1)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(find_spec("moviepy") is None or find_spec("pygame") is None, reason="needs the extra `video`")
def test_video_of_one_episode_is_written(trained, run, tmp_path):
    checkpoint = trained[0] / "checkpoints" / "last.ckpt"
    run("evaluate", f"ckpt_path={checkpoint}", "video=films", "episodes=1", "hydra.run.dir=run")
    assert [path.name for path in (tmp_path / "films").iterdir()] == ["seed_1000.mp4"]
