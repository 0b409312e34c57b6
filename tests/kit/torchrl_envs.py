"""Small TorchRL environments, most of them batched."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv

still = TensorDictModule(lambda x: x[..., :1] * 0, in_keys=["observation"], out_keys=["action"])


class Walk(EnvBase):
    """Walks on a line from a random position, for seven steps or until the distance to the middle exceeds 2."""

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


class CartPoles(EnvBase):
    """Copies of Gymnasium's CartPole-v1 in one tensor."""

    def __init__(self, num_envs=8, limit=500) -> None:
        super().__init__(batch_size=torch.Size([num_envs]))
        shape = self.batch_size
        self.observation_spec = Composite(observation=Unbounded((*shape, 4)), shape=shape)
        self.action_spec = Categorical(2, shape=shape, dtype=torch.int64)
        self.reward_spec = Unbounded((*shape, 1))
        flag = Categorical(2, shape=(*shape, 1), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape)
        self.limit = limit
        self.generator = torch.Generator()
        self.state = torch.zeros(*shape, 4)
        self.steps = torch.zeros(*shape, 1, dtype=torch.int64)

    def _set_seed(self, seed) -> None:
        self.generator.manual_seed(seed)

    def _reset(self, tensordict=None, **kwargs):
        fresh = torch.rand(self.state.shape, generator=self.generator) * 0.1 - 0.05
        if tensordict is not None and "_reset" in tensordict:
            which = tensordict["_reset"].reshape(-1, 1)
            self.state, self.steps = torch.where(which, fresh, self.state), torch.where(which, 0, self.steps)
        else:
            self.state, self.steps = fresh, torch.zeros_like(self.steps)
        return TensorDict({"observation": self.state.clone()}, self.batch_size)

    def _step(self, tensordict):
        x, dx, angle, turn = self.state.unbind(-1)
        force = tensordict["action"].float() * 20 - 10
        cos, sin = angle.cos(), angle.sin()
        push = (force + 0.05 * turn**2 * sin) / 1.1
        bend = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        slide = push - 0.05 * bend * cos / 1.1
        self.state = torch.stack([x + 0.02 * dx, dx + 0.02 * slide, angle + 0.02 * turn, turn + 0.02 * bend], -1)
        self.steps = self.steps + 1
        terminated = (self.state[:, :1].abs() > 2.4) | (self.state[:, 2:3].abs() > 12 * 2 * math.pi / 360)
        truncated = (self.steps >= self.limit) & ~terminated
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        return TensorDict(
            {"observation": self.state.clone(), "reward": torch.ones_like(self.state[:, :1]), **flags}, self.batch_size
        )


class Drift(EnvBase):
    """Stores its state in its output, as Brax does, and always resets all copies; observes three entries."""

    def __init__(self, num_envs=4) -> None:
        super().__init__(batch_size=torch.Size([num_envs]))
        shape = self.batch_size
        inner = Composite(count=Categorical(100, shape=shape), shape=shape)
        state = Composite(place=Unbounded((*shape, 2)), count=Categorical(100, shape=shape), shape=shape)
        self.observation_spec = Composite(
            state=state,
            place=Unbounded((*shape, 2), dtype=torch.float64),
            image=Bounded(0, 255, (*shape, 1, 2, 2), dtype=torch.uint8),
            inner=inner,
            shape=shape,
        )
        self.state_spec = Composite(state=state.clone(), shape=shape)
        self.action_spec = Bounded(-1.0, 1.0, (*shape, 2), dtype=torch.float64)
        self.reward_spec = Unbounded((*shape, 1))
        self.generator = torch.Generator()

    def _set_seed(self, seed) -> None:
        self.generator.manual_seed(seed)

    def _shown(self, place, count, **more):
        image = (place.abs() * 50).clamp(0, 255).to(torch.uint8)[:, None, None].expand(*self.batch_size, 1, 2, 2)
        state = TensorDict({"place": place, "count": count}, self.batch_size)
        inner = TensorDict({"count": count}, self.batch_size)
        return TensorDict(
            {"place": place.double(), "image": image, "inner": inner, "state": state, **more}, self.batch_size
        )

    def _reset(self, tensordict=None, **kwargs):
        place = torch.rand(*self.batch_size, 2, generator=self.generator)
        return self._shown(place, torch.zeros(self.batch_size, dtype=torch.int64))

    def _step(self, tensordict):
        state = tensordict["state"]
        place, count = state["place"] + tensordict["action"].float(), state["count"] + 1
        done = (place.abs() > 2).any(-1, keepdim=True)
        reward = place.sum(-1, keepdim=True)
        return self._shown(place, count, reward=reward, done=done, terminated=done.clone())


def cart_pole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)
