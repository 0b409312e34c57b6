"""The gradients of PPO, written down."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS

from torchrl_lightning.kernels import perceptron_gradients as kernels
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.keys import REPLAYED
from torchrl_lightning.learn.action_heads import CategoricalHead, ClippedNormalHead, GaussianLayer
from torchrl_lightning.learn.by_hand import (
    DISTANCES,
    Array,
    Gradients,
    HandGradients,
    array_of,
    of_modules,
    vectors_of,
)

Steps = tuple[Array, Array, Array, Array]
"""What the actor returned, actions, their log-probabilities when they were chosen, and advantages."""
_READ = ("action_log_prob", "advantage", "value_target")
_NOT_KNOWN = (*AUTO_LOSS_MASK_KEYS, REPLAYED)


def rows_of(batch: TensorDictBase, keys: Sequence[NestedKey]) -> int | None:
    """Return how many plain steps a mini-batch holds; None if some are replayed, masked, or part of sequences.

    ``keys`` are those of what is observed.
    """
    if batch.ndim != 1 or any(batch.get(key, None) is not None for key in _NOT_KNOWN):
        return None
    entries = [batch.get(key, None) for key in (*_READ, "action", *keys)]
    if not all(isinstance(entry, Tensor) and entry.is_cpu for entry in entries):
        return None
    *read, action = (entry.dtype for entry in entries[: len(_READ) + 1])
    return len(batch) if set(read) == {torch.float32} and action in (torch.int64, torch.float32) else None


class ClippedGradients(HandGradients):
    """Those of PPO."""

    def __init__(self, module: Any, gradients: Gradients, rows: int) -> None:
        actor, critic = module.policy, module.critic
        super().__init__(rows, actor, critic)
        if critic.is_shared or critic.out_keys != ["state_value"]:
            raise ValueError("Only one critic of its own is known.")
        if actor.masked or critic.trunks[0].in_keys != actor.trunk.in_keys:
            raise ValueError("No masks are known, and one observation for both.")
        if module.clip_value is not None or module.intrinsic is not None:
            raise ValueError("Clipped values and intrinsic rewards are not known.")
        self.module, self.keys = module, actor.trunk.in_keys
        self.actor = of_modules(actor.trunk, actor.head.stack, gradients)
        self.critic = of_modules(critic.trunks[0], critic.module, gradients)
        self.acting, self.judging = self.actor.memory(rows), self.critic.memory(rows)
        self.d_out, self.d_values = np.empty_like(self.acting[-1]), np.empty_like(self.judging[-1])
        self.kind = DISTANCES[module.loss_critic_type]

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Write the gradients; return the parts of the loss and diagnostics."""
        module, x = self.module, vectors_of([batch.get(key) for key in self.keys])
        entropy_coeff, out = float(module.entropy_coeff), self.actor.forward(x, self.acting)
        action, behaviour = (batch.get(key).numpy() for key in ("action", "action_log_prob"))
        steps = out, action, behaviour, module.advantage(batch).numpy()
        objective, entropy, kl, moved, clipped = self.learn(steps, float(module.clip_epsilon), entropy_coeff)
        values, target = self.critic.forward(x, self.judging), batch.get("value_target").numpy()
        far = jitted(kernels.learn_returns)(values, target, module.critic_coeff, self.kind, self.d_values)
        if kl == math.inf:  # the gradients are not finite either, which NumPy would warn of
            with np.errstate(invalid="ignore", over="ignore"):
                self._backward(x)
        else:
            self._backward(x)
        return {
            "loss_objective": objective,
            "loss_entropy": -entropy_coeff * entropy,
            "entropy": entropy,
            "loss_critic": far,
            "kl_approx": kl,
            "kl_approx_k1": -moved,
            "clip_fraction": clipped,
        }

    def _backward(self, x: Array) -> None:
        self.actor.backward(x, self.acting, self.d_out, self.every)
        self.critic.backward(x, self.judging, self.d_values, self.every)

    @abstractmethod
    def learn(self, steps: Steps, clip: float, entropy_coeff: float) -> Any:
        """Write the gradient of what the actor returned; return objective, entropy, KL, log-ratio, clipped share."""


class CategoricalGradients(ClippedGradients):
    """Those of a choice among actions."""

    def learn(self, steps: Steps, clip: float, entropy_coeff: float) -> Any:
        """Write that of the logits."""
        return jitted(kernels.learn_choices_clipped)(*steps, clip, entropy_coeff, self.d_out)


class ClippedNormalGradients(ClippedGradients):
    """Those of Normals that are clipped to a box."""

    def __init__(self, module: Any, gradients: Gradients, rows: int) -> None:
        super().__init__(module, gradients, rows)
        head = module.policy.head
        layer = head.layers
        if type(layer) is not GaussianLayer:
            raise ValueError(f"{type(layer).__name__} is not known.")
        self.box = tuple(map(array_of, (layer.center, layer.half_range, layer.log_std, head.low, head.high)))
        self.to_log_std = gradients[layer.log_std].numpy()

    def learn(self, steps: Steps, clip: float, entropy_coeff: float) -> Any:
        """Write that of the means, and that of the deviations."""
        kernel = jitted(kernels.learn_normals_clipped)
        return kernel(*steps, clip, entropy_coeff, self.box, self.d_out, self.to_log_std)


_KINDS: dict[type, type[ClippedGradients]] = {
    CategoricalHead: CategoricalGradients,
    ClippedNormalHead: ClippedNormalGradients,
}


def gradients_of(module: Any, gradients: Gradients, rows: int) -> ClippedGradients:
    """Return what writes an agent's gradients; a ValueError where they are not known."""
    kind = _KINDS.get(type(module.policy.head))
    if kind is None:
        raise ValueError(f"{type(module.policy.head).__name__} is not known.")
    return kind(module, gradients, rows)
