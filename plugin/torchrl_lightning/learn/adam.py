"""Adam for a few flat parameters: torch's fused kernel without the bookkeeping, which takes ten times as long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


class LeanAdam(Adam):
    """``torch.optim.Adam(fused=True)``: the same numbers and the same state in less time.

    Around the kernel, torch labels each step for its profiler, runs hooks, checks CUDA's graphs and groups parameters
    by device: 60 to 100 us, where a small network that lies flat needs 10. Steps that need any of it (those with hooks
    or under a gradient scaler, and the first of a parameter) are torch's own. Arguments as there.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, eps: float = 1e-8) -> None:
        super().__init__(params, lr=lr, eps=eps, fused=True)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step; return what ``closure`` returns, which computes the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [self._moving(group) for group in self.param_groups]
        if self._has_hooks() or hasattr(self, "found_inf") or None in groups:
            ordinary = Adam.step
            if not getattr(ordinary, "hooked", False):
                ordinary = Optimizer.profile_hook_step(ordinary)
            ordinary(self)
            return loss
        with torch.no_grad():
            for group, moving in zip(self.param_groups, groups, strict=True):
                if moving:
                    _step(group, moving)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps a step without this mark, by label and hooks

    def _has_hooks(self) -> bool:
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)

    def _moving(self, group: dict[str, Any]) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]] | None:
        """Return parameters, gradients and states of a group; None if torch has more to do."""
        moving = [(p, p.grad, self.state[p]) for p in group["params"] if p.grad is not None]
        unusual = group["amsgrad"] or group["decoupled_weight_decay"] or not group["fused"]
        if unusual or not all(state for _, _, state in moving) or len({p.device for p, _, _ in moving}) > 1:
            return None
        return moving


def _step(group: dict[str, Any], moving: list[tuple[Tensor, Tensor, dict[str, Tensor]]]) -> None:
    parameters, gradients, states = zip(*moving, strict=True)
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    torch._fused_adam_(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )
