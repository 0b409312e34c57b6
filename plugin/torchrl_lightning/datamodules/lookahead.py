"""N-step returns over the steps that a resumed run has to remember."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import MultiStepTransform

from torchrl_lightning.entries import to_tensordict, tree_of


class Lookahead:
    """TorchRL's ``MultiStepTransform`` with a state: the last ``n_steps`` steps, which wait for their successors.

    Args:
        n_steps: length of the returns.
        gamma: their discount.

    Example:
        >>> lookahead = Lookahead(3, 0.99)
        >>> lookahead.transform.n_steps, lookahead.state_dict()
        (3, {})
    """

    def __init__(self, n_steps: int, gamma: float) -> None:
        self.n_steps = n_steps
        # By default the flags stay those of the first step. A loss needs ``terminated`` of the last one, or it would
        # bootstrap beyond the end. ``done`` stays: it tells the buffer where episodes end.
        self.transform = MultiStepTransform(n_steps=n_steps, gamma=gamma, done_keys=["done", "truncated"])
        self._rollouts: deque[TensorDictBase] = deque()

    def note(self, rollout: TensorDictBase) -> None:
        """Remember a rollout ``[N, T]`` that is about to be written, and forget what it outdates."""
        self._rollouts.append(rollout)
        steps = sum(kept.shape[1] for kept in self._rollouts)
        while steps - self._rollouts[0].shape[1] >= self.n_steps:
            steps -= self._rollouts.popleft().shape[1]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the steps that wait, ``[N, n_steps]``; empty before the first rollout."""
        if not self._rollouts:
            return {}
        waiting = torch.cat(list(self._rollouts), 1)[:, -self.n_steps :].clone()
        return tree_of(waiting)

    def load_state_dict(self, state: dict[str, Any], *, cut: bool) -> None:
        """Continue from these steps.

        Args:
            state: what :meth:`state_dict` gave.
            cut: whether the environments have been reset since, so that the steps have no successors.
        """
        self._rollouts.clear()
        if not state:
            return
        flag = state["next"]["done"]
        waiting = to_tensordict(state, flag.shape[:2]).clone()
        waiting.names = [None, "time"]
        if cut:
            cut_off(waiting)
        self._rollouts.append(waiting)
        # Too few for a return: the transform only remembers them.
        self.transform.inv(waiting.copy())


def cut_off(rollout: TensorDictBase) -> None:
    """Mark the last step of each environment as truncated where its episode goes on but will not be seen any more."""
    following = rollout["next"]
    open_ended = ~following["done"][:, -1]
    for name in ("truncated", "done"):
        flag = following.get(name, None)
        if flag is not None:
            flag[:, -1] |= open_ended
