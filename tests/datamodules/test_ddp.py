from __future__ import annotations

import numpy as np
import pytest
import torch

from datamodules.replay_parts import reports, run_ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Folder of an uninterrupted run, of half a run, and of its resumption, on two ranks each."""
    return run_ranks("ddp_run.py", tmp_path_factory.mktemp("ddp"))


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


def test_observations_are_normalised_by_the_moments_of_all_ranks(two_ranks):
    first, second = reports(two_ranks, "whole")
    assert (first["mean"], first["spread"]) == (second["mean"], second["spread"])
    rows = np.array(first["seen"] + second["seen"])
    assert first["count"] == first["rewards"] == len(rows) == 3 * 32 * 2
    np.testing.assert_allclose(first["mean"], rows.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.array(first["spread"]) / len(rows), rows.var(0), rtol=1e-11)


def test_a_resumed_run_normalises_as_if_never_stopped(two_ranks):
    for whole, resumed in zip(reports(two_ranks, "whole"), reports(two_ranks, "resumed"), strict=True):
        assert (resumed["mean"], resumed["spread"]) == (whole["mean"], whole["spread"])
