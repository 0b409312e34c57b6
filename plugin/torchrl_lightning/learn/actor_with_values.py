"""What collects where a critic reads the features of an actor: both in one pass."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch import distributions as D

from torchrl_lightning.environments.policies import bare_call, policy_outputs
from torchrl_lightning.learn.actors import Actor, Critic, acts_deterministically


class ActorWithValues(TensorDictModuleBase):
    """An actor that also writes the values of a critic over its trunk, which runs once for both.

    A rollout then holds what its critic said of each step, so that only the successors of its last steps are left for
    an estimate of advantages.

    Args:
        actor: Acts.
        critic: Shares the actor's trunk.
    """

    def __init__(self, actor: Actor, critic: Critic) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic
        self.in_keys, self.out_keys = list(actor.in_keys), [*actor.out_keys, *critic.out_keys]

    def act_on(self, step: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Return what ``forward`` writes, and write nothing."""
        actor, critic, deterministic = self.actor, self.critic, acts_deterministically()
        if deterministic is None or bare_call(actor) is None:
            written, values = policy_outputs(actor, step.copy()), critic.values(step)
        else:
            features, states = actor.trunk.step(step)
            written = actor.choose(features, states, step, deterministic)
            values = critic.values_of(features)
        return {**written, **dict(zip(critic.out_keys, values, strict=True))}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write what the actor writes, and the values."""
        for key, value in self.act_on(tensordict).items():
            tensordict.set(key, value)
        return tensordict

    def get_dist(self, tensordict: TensorDictBase) -> D.Distribution:
        """Return the actor's distribution over actions, writing nothing."""
        distribution: Any = self.actor.get_dist(tensordict)
        return distribution
