from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from datamodules.replay_parts import reports, run_ranks
from torchrl_lightning.collectors import spawn_seed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of what all the runs of replay_ddp_run.py wrote down."""
    return run_ranks("replay_ddp_run.py", tmp_path_factory.mktemp("replay_ddp"))


@pytest.mark.parametrize(("name", "updates", "frames"), [("memory_whole", 40, 2 * 72), ("delayed_whole", 28, 2 * 64)])
def test_ranks_learn_the_same_from_experience_of_their_own(folder, name, updates, frames):
    first, second = reports(folder, name)
    assert [first["seed"], second["seed"]] == [spawn_seed(0, "collector", rank) for rank in range(2)]
    assert first["first"] != second["first"]
    assert first["cells"] != second["cells"]
    assert first["next_sample"] != second["next_sample"]
    # Each rank had built other networks; those of rank 0 count, target networks included.
    assert first["started"] == second["started"]
    assert first["ended"] == second["ended"] != first["started"]
    assert first["moments"] == second["moments"]  # of all ranks
    assert first["updates"] == second["updates"] == [updates, updates]
    assert first["frames"] == second["frames"] == frames


@pytest.mark.parametrize("kept", ["memory", "files"])
def test_two_ranks_go_on_as_if_never_stopped(folder, kept):
    for whole, resumed in zip(reports(folder, "memory_whole"), reports(folder, f"{kept}_resumed"), strict=True):
        for name in ("updates", "frames", "ended", "cells", "next_sample", "moments"):
            assert resumed[name] == whole[name], name
        assert resumed["started"] != whole["started"]


@pytest.mark.parametrize("kept", ["memory", "files"])
def test_each_rank_keeps_its_buffer_beside_the_checkpoint(folder, kept):
    states = torch.load(folder / f"{kept}_half.ckpt", weights_only=True)["ReplayDataModule"]["ranks"]
    snapshots = [state["snapshot"] for state in states]
    assert [Path(snapshot["folder"]).name for snapshot in snapshots] == ["rank_0", "rank_1"]
    assert snapshots[0]["run"] == snapshots[1]["run"]
    assert all((Path(snapshot["folder"]) / snapshot["name"]).is_dir() for snapshot in snapshots)
    assert not any("buffer" in state for state in states)


def test_resuming_on_one_rank_is_refused_but_evaluating_is_not(folder):
    refused = (folder / "alone.txt").read_text()
    assert "of 2 rank(s), but this run has 1. Resume with 2 device(s)" in refused
    validated = json.loads((folder / "validated.json").read_text())
    assert (
        validated["frames"]
        == torch.load(folder / "memory_half.ckpt", weights_only=True)["ReplayDataModule"]["ranks"][0]["frames"]
    )
    assert validated["length"] > 5
