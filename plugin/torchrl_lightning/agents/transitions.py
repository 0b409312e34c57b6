"""The tensors that an off-policy loss reads from a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import ACTION_MASK, SOURCE
from torchrl_lightning._core.tree import path_of, raw_items
from torchrl_lightning.agents.loss_functions import td_loss
from torchrl_lightning.environments.masks import nonempty_mask

Entries = list[Tensor]


@dataclass(slots=True)
class Transitions:
    """The tensors of a batch of transitions ``[*B]``; flags and rewards lack their trailing dimension."""

    now: Entries  # observation entries [*B, *F]
    after: Entries  # entries of the true successor, input of the online networks
    after_target: Entries  # the same entries, input of the target networks
    action: Tensor  # [*B, *A]
    reward: Tensor  # summed over the steps between `now` and `after`
    terminated: Tensor  # whether `after` is terminal; its value is then 0
    done: Tensor | None  # whether the episode ends at `after`, for any reason
    discount: float | Tensor  # factor of the value of `after`; a tensor if the number of steps varies
    weight: Tensor | None = None  # importance weights, if the batch has any
    mask: Tensor | None = None  # valid steps; None means all steps
    # For recurrent networks:
    is_init: Tensor | None = None  # whether an episode starts at `now`
    states: Entries | None = None  # recurrent states before `now`
    steps: Tensor | None = None  # number of steps from `now` to `after`; None means one step
    allowed: Tensor | None = None  # actions allowed after the step [*B, A]; None allows all
    source: Tensor | None = None  # number of the row's source buffer, 0 for the agent's; None if there is only one

    @property
    def detached(self) -> Entries:
        """``now``, detached so that no gradient reaches the memory."""
        return [entry.detach() for entry in self.now]

    def target(self, value: Tensor) -> Tensor:
        r"""Return the one-step (or n-step) target \(r + \gamma (1 - \mathrm{terminated}) V(s')\), ``[*B]``."""
        if isinstance(self.discount, Tensor):
            bootstrapped = torch.addcmul(self.reward, self.discount, value)
        else:
            bootstrapped = torch.add(self.reward, value, alpha=self.discount)
        return torch.where(self.terminated, self.reward, bootstrapped)

    def td_loss(self, values: Tensor, target: Tensor, distance: str) -> tuple[Tensor, Tensor]:
        """Return the mean TD loss over the valid steps, and the absolute errors ``[*B]``."""
        if self.mask is None and self.weight is None:
            return td_loss(values, target, distance, reduction="mean")
        loss, error = td_loss(values, target, distance, self.mask)
        return self.mean(loss), error

    def mean(self, loss: Tensor) -> Tensor:
        r"""Return the weighted mean over the valid steps, \(\sum_i w_i l_i / \sum_i w_i\), as TorchRL's losses do.

        The weights \(w_i\) are the importance weights of prioritized replay, or 1. Diagnostics use the same mean.
        """
        if self.mask is None and self.weight is None:
            return loss.mean()
        if self.mask is not None:
            # Select instead of multiplying: masked steps may be NaN, and nan * 0 is nan.
            loss = torch.where(self.mask, loss, 0.0)
        weight = loss.new_ones(()).expand_as(loss) if self.weight is None else self.weight
        if self.mask is not None:
            weight = weight * self.mask
        return (loss * weight).sum() / weight.sum().clamp_min(torch.finfo(loss.dtype).tiny)


def read_transitions(
    batch: TensorDictBase,
    keys: Sequence[NestedKey],
    gamma: float,
    state_keys: Sequence[NestedKey] = (),
    *,
    masked: bool = False,
) -> Transitions:
    """Read the entries that a loss needs from transitions ``[B]`` or sequences ``[B, T]``.

    The discount is the batch's ``gamma`` entry if present. Otherwise it is the argument ``gamma``, raised to the power
    of the batch's ``steps_to_next_obs`` if present. TorchRL's ``MultiStepTransform`` writes both entries. ``mask``
    marks valid steps and ``priority_weight`` weights them. If ``masked``, the successors' ``action_mask`` marks allowed
    actions. Raise KeyError if a required entry is missing.
    """
    # Read as plain dicts: a TensorDict's `get` takes two microseconds, and a batch has a dozen entries.
    entries = raw_items(batch)
    if "next" not in entries:
        raise missing_entry(batch, "next", "off-policy losses learn from transitions")
    shape = batch.shape
    action, *now = _entries(entries, ("action", *keys), batch)
    reward, terminated, *after = _entries(raw_items(entries["next"]), ("reward", "terminated", *keys), batch)
    reward, terminated = reward.reshape(shape), terminated.reshape(shape)
    discount: float | Tensor = gamma
    batch_discount, steps = entries.get("gamma"), entries.get("steps_to_next_obs")
    if batch_discount is not None:
        discount = batch_discount.reshape(shape).to(reward.dtype)
    elif steps is not None:
        discount = gamma ** steps.reshape(shape).to(reward.dtype)
    weight = entries.get("priority_weight")
    if weight is not None:
        weight = weight.to(reward.dtype)
        # The batch has one weight for each step or one weight for each sequence.
        weight = weight.reshape(shape) if weight.numel() == shape.numel() else weight.reshape(shape[0], 1).expand(shape)
    mask = entries.get("mask")
    done = is_init = states = num_steps = None
    if state_keys:
        num_steps = None if steps is None else steps.reshape(shape)
        done, is_init, *states = _entries(entries, (("next", "done"), "is_init", *state_keys), batch)
        done, is_init = done.reshape(shape), is_init.reshape(shape)
    return Transitions(
        now=now,
        after=after,
        after_target=after,
        action=action,
        reward=reward,
        terminated=terminated,
        done=done,
        discount=discount,
        weight=weight,
        mask=None if mask is None else mask.reshape(shape),
        is_init=is_init,
        states=states,
        steps=num_steps,
        source=entries.get(SOURCE),
        allowed=nonempty_mask(_entries(raw_items(entries["next"]), [ACTION_MASK], batch)[0]) if masked else None,
    )


def _entries(first_level: Mapping[str, Any], keys: Sequence[NestedKey], batch: TensorDictBase) -> Entries:
    """Return the entries with these keys from one level of a batch."""
    entries = []
    for key in keys:
        value: Any = first_level
        for name in (key,) if isinstance(key, str) else path_of(key):
            value = (value if isinstance(value, Mapping) else raw_items(value)).get(name)
            if value is None:
                raise missing_entry(batch, key, "the buffer must store the inputs and outputs of the policy")
        entries.append(value)
    return entries


def missing_entry(batch: TensorDictBase, key: NestedKey, hint: str) -> KeyError:
    """Return a KeyError for a missing entry of a batch, with the existing entries and a remedy."""
    return KeyError(f"the batch has no {key!r}, only {sorted(map(str, batch.keys(True, True)))}; {hint}")
