"""The gradients of PPO over a choice among actions, written down."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS

from torchrl_lightning.kernels import perceptron_gradients as kernels
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.keys import REPLAYED
from torchrl_lightning.learn.action_heads import CategoricalHead
from torchrl_lightning.learn.by_hand import DISTANCES, Gradients, HandGradients, of_modules, vectors_of

_READ = ("action_log_prob", "advantage", "value_target")
_NOT_KNOWN = (*AUTO_LOSS_MASK_KEYS, REPLAYED)


def rows_of(batch: TensorDictBase) -> int | None:
    """Return how many plain steps a mini-batch holds; None if some are replayed, masked, or part of sequences."""
    if batch.ndim != 1 or any(batch.get(key, None) is not None for key in _NOT_KNOWN):
        return None
    for key in _READ:
        entry = batch.get(key, None)
        if not isinstance(entry, Tensor) or entry.dtype is not torch.float32 or not entry.is_cpu:
            return None
    return len(batch) if batch.get("action").dtype is torch.int64 else None


class ClippedGradients(HandGradients):
    """Those of PPO."""

    def __init__(self, module: Any, gradients: Gradients, rows: int) -> None:
        actor, critic = module.policy, module.critic
        super().__init__(rows, actor, critic)
        if type(actor.head) is not CategoricalHead or critic.is_shared or critic.out_keys != ["state_value"]:
            raise ValueError("Only a choice among actions, and one critic of its own, are known.")
        if actor.masked or critic.trunks[0].in_keys != actor.trunk.in_keys:
            raise ValueError("No masks are known, and one observation for both.")
        if module.clip_value is not None or module.intrinsic is not None:
            raise ValueError("Clipped values and intrinsic rewards are not known.")
        self.module, self.keys = module, actor.trunk.in_keys
        self.actor = of_modules(actor.trunk, actor.head.stack, gradients)
        self.critic = of_modules(critic.trunks[0], critic.module, gradients)
        self.acting, self.judging = self.actor.memory(rows), self.critic.memory(rows)
        self.d_logits, self.d_values = np.empty_like(self.acting[-1]), np.empty_like(self.judging[-1])
        self.kind = DISTANCES[module.loss_critic_type]

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Write the gradients; return the parts of the loss and diagnostics."""
        module, x = self.module, vectors_of([batch.get(key) for key in self.keys])
        entropy_coeff, clip = float(module.entropy_coeff), float(module.clip_epsilon)
        objective, entropy, moved, clipped = jitted(kernels.learn_clipped)(
            self.actor.forward(x, self.acting),
            batch.get("action").numpy(),
            batch.get("action_log_prob").numpy(),
            module.advantage(batch).numpy(),
            clip,
            entropy_coeff,
            self.d_logits,
        )
        values, target = self.critic.forward(x, self.judging), batch.get("value_target").numpy()
        far = jitted(kernels.learn_returns)(values, target, module.critic_coeff, self.kind, self.d_values)
        self.actor.backward(x, self.acting, self.d_logits, self.every)
        self.critic.backward(x, self.judging, self.d_values, self.every)
        return {
            "loss_objective": objective,
            "loss_entropy": -entropy_coeff * entropy,
            "entropy": entropy,
            "loss_critic": far,
            "kl_approx": -moved,
            "clip_fraction": clipped,
        }
