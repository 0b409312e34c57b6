"""Exploring policies of off-policy agents; under deterministic interaction they exploit."""

from __future__ import annotations

__room__ = ["EpsilonGreedyPolicy", "ExploringPolicy", "NoisyPolicy", "StochasticPolicy"]

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_lightning.keys import FEATURES
from torchrl_lightning.learn.trunks import RecurrentTrunk

DETERMINISTIC = (InteractionType.DETERMINISTIC, InteractionType.MODE, InteractionType.MEAN)


@dataclass(frozen=True)
class FramesDecay:
    """Linear decay from ``start`` to ``end`` over ``frames`` frames, then constant."""

    start: float
    end: float
    frames: int

    def __post_init__(self) -> None:
        if min(self.start, self.end) < 0 or (self.frames < 1 and self.start != self.end):
            raise ValueError(
                f"exploration from {self.start} to {self.end} over {self.frames} frames makes no sense: both must be "
                "at least 0, and the frames at least 1"
            )

    def __call__(self, frames: int) -> float:
        """Return the value after ``frames`` frames."""
        if frames >= self.frames:
            return self.end
        return self.start + (self.end - self.start) * frames / self.frames


class ExploringPolicy(TensorDictModuleBase):
    """A network that chooses actions, optionally behind a memory, with an amount of exploration.

    It writes ``action`` and the next recurrent states and nothing else, so that random warm-up frames hold the same
    entries. ``amount`` is a buffer: collectors in other processes get it with the weights.

    Args:
        network: A TensorDict module with ``trunk`` and ``head``.
        memory: Maps observations to the features that the network reads.
    """

    amount: Tensor

    def __init__(self, network: TensorDictModuleBase, memory: RecurrentTrunk | None = None) -> None:
        super().__init__()
        self.network, self.memory = network, memory
        self.in_keys = list(network.in_keys if memory is None else memory.in_keys)
        states = [] if memory is None else [key for key in memory.out_keys if key != FEATURES]
        self.out_keys = ["action", *states]
        self.next_state_keys, self.keys = states, list(network.trunk.in_keys)
        self.register_buffer("amount", torch.zeros(()))

    def act_on(self, step: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Return action and next recurrent states of a step ``[*B]`` by key, writing nothing.

        Collectors call it instead of the policy: the same values and random numbers, without a TensorDict's cost.
        """
        explore = interaction_type() not in DETERMINISTIC
        if self.memory is None:
            return {"action": self.act([step.get(key) for key in self.keys], explore)}
        features, states = self.memory.step(step)
        return {"action": self.act([features], explore), **dict(zip(self.next_state_keys, states, strict=True))}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write action and next recurrent states."""
        for key, value in self.act_on(tensordict).items():
            tensordict.set(key, value)
        return tensordict

    def act(self, entries: list[Tensor], explore: bool) -> Tensor:
        """Return actions for observation entries (or a memory's features)."""
        raise NotImplementedError


class EpsilonGreedyPolicy(ExploringPolicy):
    """The best action, or with probability ``amount`` a random one (Mnih et al., 2015)."""

    def act(self, entries: list[Tensor], explore: bool) -> Tensor:
        """Return integer actions ``[*B]``, or one-hot ones ``[*B, A]``."""
        values = self.network.values(entries)
        action = values.argmax(-1)
        if explore:
            random = torch.rand(action.shape, device=action.device) < self.amount
            action = torch.where(random, torch.randint_like(action, values.shape[-1]), action)
        if self.network.action_space == "categorical":
            return action
        return nn.functional.one_hot(action, values.shape[-1]).to(self.network.action_dtype)


class StochasticPolicy(ExploringPolicy):
    """Samples of the network's own distribution; its mean under deterministic exploration."""

    def act(self, entries: list[Tensor], explore: bool) -> Tensor:
        """Return actions ``[*B, A]``."""
        head = self.network.head
        return head.act(head(self.network.trunk.encoder(*entries)), deterministic=not explore)


class NoisyPolicy(ExploringPolicy):
    """A deterministic action with Gaussian noise of deviation ``amount``, in units of half the action range."""

    def act(self, entries: list[Tensor], explore: bool) -> Tensor:
        """Return actions ``[*B, A]`` within the bounds."""
        head = self.network.head
        squashed = head.squashed(self.network.trunk.encoder(*entries))
        if explore:
            squashed = (squashed + torch.randn_like(squashed) * self.amount).clamp(-1.0, 1.0)
        return head.scale(squashed)
