"""Exploration policies of off-policy agents; they do not explore under deterministic interaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_lightning._core.keys import ACTION_MASK, FEATURES
from torchrl_lightning._core.validators import fraction
from torchrl_lightning.agents.analytic import compiled_call
from torchrl_lightning.agents.networks.trunks import RecurrentTrunk
from torchrl_lightning.environments.masks import allowed_values, draw_choice

DETERMINISTIC = (InteractionType.DETERMINISTIC, InteractionType.MODE, InteractionType.MEAN)


@dataclass(frozen=True)
class FramesDecay:
    """Decay linearly from ``start`` to ``end`` over ``frames`` frames; later values are ``end``."""

    start: float
    end: float
    frames: int

    def __post_init__(self) -> None:
        if min(self.start, self.end) < 0 or (self.frames < 1 and self.start != self.end):
            raise ValueError(
                "start and end of the exploration must be at least 0 and its frames at least 1, got "
                f"start={self.start}, end={self.end} and frames={self.frames}."
            )

    def __call__(self, frames: int) -> float:
        """Return the value after ``frames`` frames."""
        if frames >= self.frames:
            return self.end
        return self.start + (self.end - self.start) * frames / self.frames


class ExploringPolicy(TensorDictModuleBase):
    """A policy network with exploration noise and an optional recurrent memory.

    It writes only ``action`` and the next recurrent states, so that random warm-up frames have the same entries.
    ``amount`` is a buffer, so that collectors in other processes receive it with the weights.

    Args:
        network: A TensorDict module with ``trunk`` and ``head``.
        memory: The module that maps observations to the input features of the network.
        masked: Pass ``action_mask`` to ``act`` as the last entry.
    """

    amount: Tensor
    exponent = 1.0
    """Exploration uses ``amount`` to the power of this exponent."""

    def __init__(
        self, network: TensorDictModuleBase, memory: RecurrentTrunk | None = None, *, masked: bool = False
    ) -> None:
        super().__init__()
        self.network, self.memory = network, memory
        self._mask_keys: list[NestedKey] = [ACTION_MASK] if masked else []
        self.in_keys = [*(network.in_keys if memory is None else memory.in_keys), *self._mask_keys]
        states = [] if memory is None else [key for key in memory.out_keys if key != FEATURES]
        self.out_keys = ["action", *states]
        self.next_state_keys, self.entry_keys = states, [*network.trunk.in_keys, *self._mask_keys]
        self.register_buffer("amount", torch.zeros((), dtype=torch.float32))

    def compute_step(self, step: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Return action and next recurrent states of a step ``[*B]`` by key, without writing them.

        Collectors call this method instead of ``forward``, because it returns the same values from the same random
        numbers without the cost of a TensorDict.
        """
        explore = interaction_type() not in DETERMINISTIC
        if self.memory is None:
            return {"action": self.act([step.get(key) for key in self.entry_keys], explore)}
        features, states = self.memory.step(step)
        return {
            "action": self.act([features, *map(step.get, self._mask_keys)], explore),
            **dict(zip(self.next_state_keys, states, strict=True)),
        }

    def bind_inputs(self, step: TensorDictBase) -> Callable[[], dict[NestedKey, Tensor]]:
        """Return a function that runs :meth:`compute_step` on a CPU step ``[N]``; the caller overwrites its tensors."""
        return compiled_call(self, step) or (lambda: self.compute_step(step))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write action and next recurrent states."""
        for key, value in self.compute_step(tensordict).items():
            tensordict.set(key, value)
        return tensordict

    def act(self, entries: list[Tensor], explore: bool) -> Tensor:
        """Return actions for observation entries, or for the features of a memory."""
        raise NotImplementedError


class EpsilonGreedyPolicy(ExploringPolicy):
    r"""Take a random action with probability \(\epsilon\), otherwise the greedy action (Mnih et al., 2015).

    ``amount`` is \(\epsilon\). Worker \(i\) of \(N\) uses the probability \(\epsilon^{1 + i \alpha / (N - 1)}\), where
    \(\alpha\) is the ``spread`` (Horgan et al., 2018). An action mask restricts both the random and the greedy action.

    Args:
        network: A TensorDict module with ``trunk``, ``head``, and ``values`` of all actions.
        memory: The module that maps observations to the input features of the network.
        spread: The constant \(\alpha\); 0 gives all workers the same probability.
        epsilon: Initial value of ``amount``.
    """

    def __init__(
        self,
        network: TensorDictModuleBase,
        memory: RecurrentTrunk | None = None,
        *,
        spread: float = 0.0,
        epsilon: float = 0.0,
        masked: bool = False,
    ) -> None:
        super().__init__(network, memory, masked=masked)
        self.spread = spread
        self.amount.fill_(fraction(epsilon, "epsilon"))

    def set_worker(self, number: int, count: int) -> None:
        """Set the exploration exponent of worker ``number`` of ``count``."""
        self.exponent = 1.0 + self.spread * number / max(count - 1, 1)

    def act(self, entries: list[Tensor], explore: bool) -> Tensor:
        """Return integer actions ``[*B]``, or one-hot actions ``[*B, A]``."""
        mask = entries[-1] if self._mask_keys else None
        values = self.network.values(entries[: len(entries) - len(self._mask_keys)])
        if mask is not None:
            values = allowed_values(values, mask)
        action = values.argmax(-1)
        if explore:
            epsilon = self.amount**self.exponent
            is_random = torch.rand(action.shape, dtype=torch.float32, device=action.device) < epsilon
            random_action = torch.randint_like(action, values.shape[-1]) if mask is None else draw_choice(mask)
            action = torch.where(is_random, random_action, action)
        if self.network.action_space == "categorical":
            return action
        return nn.functional.one_hot(action, values.shape[-1]).to(self.network.action_dtype)


class StochasticPolicy(ExploringPolicy):
    """Sample from the network's distribution, or take the mean under deterministic interaction."""

    def act(self, entries: list[Tensor], explore: bool) -> Tensor:
        """Return actions ``[*B, A]``."""
        head = self.network.head
        return head.act(head(self.network.trunk.encoder(*entries)), deterministic=not explore)


class NoisyPolicy(ExploringPolicy):
    """Add Gaussian noise with deviation ``amount``, in units of half the action range, to a deterministic action."""

    def act(self, entries: list[Tensor], explore: bool) -> Tensor:
        """Return actions ``[*B, A]`` within the bounds."""
        head = self.network.head
        squashed = head.squashed(self.network.trunk.encoder(*entries))
        if explore:
            squashed = (squashed + torch.randn_like(squashed) * self.amount).clamp(-1.0, 1.0)
        return head.scale(squashed)
