"""A small batched environment of TorchRL's."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv

still = TensorDictModule(lambda x: x[..., :1] * 0, in_keys=["observation"], out_keys=["action"])


class Walk(EnvBase):
    """Walks on a line from a drawn place, for seven steps or until it is further than 2 from the middle."""

    def __init__(self, batch_size=(), device=None, seeded=True) -> None:
        super().__init__(batch_size=torch.Size(batch_size), device=device)
        shape = self.batch_size
        self.observation_spec = Composite(observation=Unbounded((*shape, 2)), shape=shape)
        self.action_spec = Bounded(-1.0, 1.0, (*shape, 1))
        self.reward_spec = Unbounded((*shape, 1))
        flag = Categorical(2, shape=(*shape, 1), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape)
        self.seeded = seeded
        self.generator = torch.Generator()
        self.generator.seed()
        self.place, self.steps = torch.zeros(*shape, 1), torch.zeros(*shape, 1)

    def _set_seed(self, seed) -> None:
        if self.seeded:
            self.generator.manual_seed(seed)

    def _shown(self, **more):
        return TensorDict({"observation": torch.cat([self.place, self.steps], -1), **more}, self.batch_size)

    def _reset(self, tensordict=None, **kwargs):
        which = torch.ones(*self.batch_size, 1, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict:
            which = tensordict["_reset"].reshape(which.shape)
        drawn = torch.rand(*self.batch_size, 1, generator=self.generator)
        self.place, self.steps = torch.where(which, drawn, self.place), torch.where(which, 0.0, self.steps)
        return self._shown()

    def _step(self, tensordict):
        self.place, self.steps = self.place + tensordict["action"], self.steps + 1
        terminated = self.place.abs() > 2
        truncated = (self.steps >= 7) & ~terminated
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        return self._shown(reward=-self.place.abs(), **flags)


def cart_pole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)
