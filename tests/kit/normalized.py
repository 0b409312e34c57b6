"""The normalisation statistics in a run's state, and all rollouts that its collector has delivered."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from torchrl_lightning import GymnasiumCollector
from torchrl_lightning._core.moments import Moments
from torchrl_lightning.datamodules._run.normalization import Normalization
from torchrl_lightning.environments import environment_specs, make_vector_env


class Recording(GymnasiumCollector):
    """Stores its rollouts ``[N, T]``."""

    def rollout(self) -> Any:
        batch = super().rollout()
        self.__dict__.setdefault("recorded", []).append(batch.clone())
        return batch


def recording(num_envs: int, frames: int, **kwargs: Any) -> Any:
    return partial(Recording, "CartPole-v1", num_envs=num_envs, frames_per_batch=frames, **kwargs)


def all_of(data: Any, *key: str) -> Tensor:
    """Return an entry of all rollouts of a run's collector, ``[N, T]``."""
    return torch.cat([batch[key] for batch in data.collector.recorded], 1)


def statistics_of(data: Any, observation: bool = True) -> dict[str, Moments]:
    """Return the moments in a run's state: of the observation, and of the discounted sums of rewards."""
    state = data.state_dict()
    kept = Normalization(observation, True, 10.0)
    kept.specs(environment_specs(make_vector_env("CartPole-v1", 1)))
    kept.load_statistics(state["normalization"])
    kept.load_state_dict(state["ranks"][0]["normalization"])
    kept.advance()
    found = kept.statistics()
    moments = {"reward": Moments(**found["reward"])}
    if observation:
        (entry,) = found["observation"]["entries"]
        moments["observation"] = Moments(**entry["moments"])
    return moments


def check_statistics(data: Any, observation: bool = True, gamma: float = 0.99) -> None:
    """Compare a run's statistics with the statistics of all its rollouts, computed step by step."""
    found = statistics_of(data, observation)
    if observation:
        rows = all_of(data, "observation").flatten(0, 1).double().numpy()
        assert found["observation"].count == len(rows)
        np.testing.assert_allclose(found["observation"].mean, rows.mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found["observation"].variance, rows.var(0), rtol=1e-11)
    reward, done = (all_of(data, "next", name)[..., 0].numpy() for name in ("reward", "done"))
    sums, last = np.zeros(reward.shape), np.zeros(len(reward))
    for t in range(reward.shape[1]):
        last = sums[:, t] = reward[:, t].astype(float) + gamma * last
        last = last * ~done[:, t]
    assert found["reward"].count == sums.size
    np.testing.assert_allclose(found["reward"].variance, sums.var(), rtol=1e-11)


class Checking(L.Callback):
    """Checks the statistics after each epoch, and counts the checks."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.checks = settings, 0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        check_statistics(trainer.datamodule, **self.settings)  # type: ignore[attr-defined]
        self.checks += 1
