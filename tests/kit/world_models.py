"""A point that an action pushes, ensembles that learn its movement, and data for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Bounded, Categorical, Unbounded

from kit.fake_data import FakeData, Loader
from kit.seeds import generator
from kit.specs import specs_of
from torchrl_lightning.agents import GaussianEnsemble, WorldModel
from torchrl_lightning.dynamics import DynamicsTargets

POINT = specs_of(Bounded(-1.0, 1.0, (1,)), observation=Unbounded(2))
# two observation entries, and discrete actions
NEAR_AND_FAR = specs_of(Categorical(3), near=Unbounded(2), far=Unbounded((1, 2)))


def pushed(count: int, seed: int | None = None) -> TensorDict:
    """Return steps of the point. The reward is highest in the middle."""
    rng = None if seed is None else generator(seed)
    observation = torch.randn(count, 2, generator=rng)
    action = torch.rand(count, 1, generator=rng) * 2.0 - 1.0
    velocity = observation[:, 1:] + 0.1 * action
    following = torch.cat([observation[:, :1] + 0.1 * velocity, velocity], 1)
    after = {"observation": following, "reward": -following[:, :1].square()}
    return TensorDict({"observation": observation, "action": action, "next": after}, [count])


def walled(count: int, seed: int = 0) -> TensorDict:
    """Return steps of the point between two walls. An episode terminates beyond them."""
    found = pushed(count, seed)
    found["next", "terminated"] = found["next", "observation"][:, :1].abs() > 1.0
    return found


def targets_of(specs: Any = POINT, **settings: Any) -> DynamicsTargets:
    return DynamicsTargets(specs.observation, specs.action, **settings)


def world_model(targets: DynamicsTargets | None = None, elites: list[int] | None = None, **kwargs: Any) -> WorldModel:
    """Make a world model of three different members, by default of the point."""
    torch.manual_seed(0)
    targets = targets or targets_of()
    if len(targets.input_columns) == 3:
        targets.fit(pushed(50))
    sizes = 3, len(targets.input_columns), len(targets.target_columns), [8]
    ensemble = GaussianEnsemble(*sizes, ends_by=len(targets.observation_columns) if targets.has_terminated else 0)
    ensemble.standardise(targets.input_scaler, targets.target_scaler)
    for bias in ensemble.biases:
        torch.nn.init.normal_(bias)
    found = WorldModel(ensemble, targets, **kwargs)
    if elites is not None:
        found.elites = torch.tensor(elites)
    return found


def known_reward(observation: Tensor, action: Tensor, following: Tensor) -> Tensor:
    return (observation[..., :1] + 2.0 * action + 4.0 * following[..., 1:]).squeeze(-1)


class FakeDynamics(FakeData):
    """Yields three batches an epoch. A new fit begins every ``refit`` epochs, or when the module ends a fit."""

    def __init__(self, members: int = 3, refit: int = 4, holdout: int = 20, **settings: Any) -> None:
        super().__init__(specs=POINT, note=lambda module: None)
        self.num_members, self.refit, self.holdout = members, refit, holdout
        self.targets = targets_of(**settings)
        self.build_options = {"num_members": members, "targets": self.targets}
        self.epochs = self.fits = 0
        self.rows = walled(60, seed=0)

    def val_dataloader(self) -> Loader:
        rows = walled(self.holdout, seed=1)
        return Loader(2, lambda: iter(self.targets(rows).split(self.holdout - 4)))

    def make(self, module: Any, rng: torch.Generator) -> Iterator[TensorDict]:
        if self.epochs % self.refit == 0 or module.fit_is_over:
            self.frames, self.fits = self.frames + 20, self.fits + 1
            self.targets.fit(self.rows[: 20 + self.frames])
            module.begin_fit(self.targets)
        self.epochs += 1
        rng.manual_seed(self.epochs)
        for _ in range(3):
            yield self.targets(self.rows[torch.randint(60, (self.num_members, 16), generator=rng)])

    def state_dict(self) -> dict[str, Any]:
        return {"frames": self.frames, "specs": {}}
