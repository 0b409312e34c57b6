"""Two ranks collect different experience, and have the same weights and statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kit.actor_critic import TinyActorCritic, rollouts
from kit.normalized import recording
from kit.ranks import Report, fit_ranks, reports, run_ranks
from kit.runs import SaveAt, parameters
from torchrl_lightning import LastCheckpoint


class FirstBatch(TinyActorCritic):
    """Store the sum of the first observations."""

    def training_step(self, batch, batch_idx):
        self.first = getattr(self, "first", batch["observation"].sum().item())
        return super().training_step(batch, batch_idx)


def met(module, data):
    normalization = data.state_dict()["normalization"]  # all ranks must call it together
    (observed,) = normalization["observation"]["entries"]
    return {
        "seed": data.collector.seed,
        "observations": module.first,
        "updates": module.updates,
        "frames": data.frames,
        "parameters": parameters(module).tolist(),
        "count": observed["moments"]["count"],
        "mean": observed["moments"]["mean"].tolist(),
        "spread": observed["moments"]["spread"].tolist(),
        "rewards": normalization["reward"]["count"],
        "seen": [row for each in data.collector.recorded for row in each["observation"].flatten(0, 1).tolist()],
    }


def fits(folder):
    normalised = {"normalize_observation": True, "normalize_reward": True, "reset_at_each_batch": True}
    sizes = {"num_envs": 2, "frames_per_batch": 32, "mini_batch_size": 16, "eval_episodes": 1}

    def fit(name, callback, resume=None):
        torch.manual_seed(0)
        data = rollouts(collector=recording(2, 32), **sizes, **normalised)
        # Three epochs are not a multiple of five: all ranks have to evaluate and save the end together.
        ends = {"max_epochs": 3, "limit_val_batches": 1, "check_val_every_n_epoch": 5}
        fit_ranks(FirstBatch(), data, Report(folder, name, met), callback, resume=resume, **ends)

    fit("whole", SaveAt(folder / "half.ckpt", "on_train_epoch_end", 2, then="go on"))
    fit("resumed", LastCheckpoint(folder, "end"), folder / "half.ckpt")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Return the folder of a run that saves a checkpoint, and of the resumed run."""
    return run_ranks(fits, tmp_path_factory.mktemp("ddp"))


def test_ranks_have_their_own_experience_and_equal_parameters(two_ranks):
    first, second = reports(two_ranks, "whole")
    assert first["seed"] != second["seed"]
    assert first["observations"] != second["observations"]
    assert first["updates"] == second["updates"] == 3 * 4
    assert first["frames"] == second["frames"] == 3 * 32 * 2
    assert first["parameters"] == second["parameters"]


@pytest.mark.parametrize(("name", "frames"), [("half", 128), ("end", 192)])
def test_checkpoint_holds_the_states_of_all_ranks(name, frames, two_ranks):
    states = torch.load(two_ranks / f"{name}.ckpt", weights_only=True)["OnPolicyDataModule"]["ranks"]
    assert [state["frames"] for state in states] == [frames, frames]
    first, second = (state["buffer"] for state in states)
    assert str(first) != str(second)


def test_two_ranks_resume_and_normalise_as_an_uninterrupted_run(two_ranks):
    for whole, resumed in zip(reports(two_ranks, "whole"), reports(two_ranks, "resumed"), strict=True):
        for key in ("frames", "parameters", "mean", "spread"):
            assert resumed[key] == whole[key], key


def test_observations_are_normalised_by_the_moments_of_all_ranks(two_ranks):
    first, second = reports(two_ranks, "whole")
    assert (first["mean"], first["spread"]) == (second["mean"], second["spread"])
    rows = np.array(first["seen"] + second["seen"])
    assert first["count"] == first["rewards"] == len(rows) == 3 * 32 * 2
    np.testing.assert_allclose(first["mean"], rows.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.array(first["spread"]) / len(rows), rows.var(0), rtol=1e-11)
