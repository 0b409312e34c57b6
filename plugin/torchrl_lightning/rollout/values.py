"""Compute values and log-probabilities of a rollout with as few critic calls as possible."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.modules import set_recurrent_mode

from torchrl_lightning._core.keys import DONE, IS_INIT, RECURRENT_STATE, TERMINATED
from torchrl_lightning._core.modules import EvaluationMode, device_of
from torchrl_lightning._core.protocols import PolicyApi
from torchrl_lightning._core.tree import is_below, join, keys_below, next_key
from torchrl_lightning.environments.env_ids import id_changes
from torchrl_lightning.rollout.batch_sizes import device_in, sequences

RECURRENT_KEYS: tuple[NestedKey, ...] = (RECURRENT_STATE,)


def value_keys(data: TensorDictBase, critic: TensorDictModuleBase | None, root: NestedKey) -> list[NestedKey]:
    """Return the value keys at or below ``root``, one for each critic."""
    keys = [] if critic is None else [join(key, ()) for key in critic.out_keys if is_below(key, root)]
    return keys or keys_below(data, root)


def trace_ends(rollout: TensorDictBase) -> Tensor:
    """Return a mask of the trace ends: done steps, and steps before a step of another episode."""
    done = rollout.get(DONE)
    is_init, changes = rollout.get(IS_INIT, None), id_changes(rollout, 0)
    has_starts = is_init is not None and is_init.shape == done.shape
    if not has_starts and changes is None:
        return done
    ends: Tensor = done.clone()
    if has_starts:
        ends[:-1] |= is_init[1:]
    if changes is not None:
        ends[:-1] |= changes[1:].view(*changes[1:].shape, *[1] * (done.ndim - rollout.ndim))
    return ends


@torch.no_grad()
def fill_values(
    rollout: TensorDictBase,
    critic: TensorDictModuleBase | None,
    roots: Mapping[NestedKey, bool],
    *,
    known: Collection[NestedKey],
    recurrent_keys: Collection[NestedKey] = RECURRENT_KEYS,
    unroll: bool = False,
) -> None:
    """Write the values of all steps and their successors to a time-major rollout.

    ``V'[t]`` is ``V[t+1]`` within an episode. For truncated and last steps, the critic reads ``("next", ...)`` in one
    separate batch or, with ``unroll``, together with all steps. The successor value of a terminated step is 0.

    Args:
        rollout: ``[T, N]``; for each root, ``root`` and ``("next", root)`` are written to it.
        critic: writes the values; may be ``None`` if all values are known.
        roots: maps each value key to True if the returns stop at the end of an episode.
        known: keys of the values that are not computed again.
        recurrent_keys: root keys of recurrent states.
        unroll: run a recurrent critic over whole sequences, beginning with the first stored state. If False, run it on
            each step with the stored state.

    Raises:
        RuntimeError: values are missing and no critic is given.
        KeyError: the critic does not write ``root``, or a successor state lacks an entry that the critic reads.
        ValueError: the critic returned NaN or infinite values.
    """
    missing: list[NestedKey] = []
    missing_next: dict[NestedKey, bool] = {}  # key without successor values: True for episodic returns
    for root, episodic in roots.items():
        keys = value_keys(rollout, critic, root)
        if not keys and critic is None:
            raise RuntimeError(
                f"The values {root!r} are missing, and critic is None. Pass critic=..., assign buffer.critic, or use a "
                "policy that writes the values."
            )
        if not keys:
            raise KeyError(f"The critic must write {root!r}, got out_keys={list(critic.out_keys)}.")  # type: ignore[union-attr]
        for key in keys:
            if key not in known:
                missing.append(key)
            if next_key(key) not in known:
                missing_next[key] = episodic
    bootstrap_mask = _bootstrap_mask(rollout, missing_next)
    successors = None
    if missing:
        critic = require_module(critic, "critic", f"to compute {missing}")
        if unroll and is_recurrent(critic.in_keys, recurrent_keys):
            out, successors = run_on_sequences(critic, rollout, bootstrap_mask, recurrent_keys)
        else:
            out = run_module(critic, flat_entries(rollout, critic.in_keys)).unflatten(0, rollout.batch_size)
        for key in missing:
            rollout.set(key, _check_finite(out.get(key), key))
    if successors is None and bool(bootstrap_mask.any()):
        critic = require_module(critic, "critic", "for the successors of truncated and last steps")
        rows = bootstrap_mask.flatten().nonzero().squeeze(-1)
        successors = run_on_successors(critic, rollout, rows)
    _fill_next(rollout, missing_next, bootstrap_mask, successors)


def _bootstrap_mask(rollout: TensorDictBase, missing_next: Mapping[NestedKey, bool]) -> Tensor:
    """Return a mask ``[T, N]`` of the truncated and last steps. The critic evaluates their successors."""
    steps, envs = rollout.shape
    mask = torch.zeros(steps, envs, dtype=torch.bool, device=rollout.get(TERMINATED).device)
    if True in missing_next.values():
        mask |= trace_ends(rollout).reshape(steps, envs, -1)[..., 0]
        mask[-1] = True
        mask &= ~rollout.get(TERMINATED).reshape(steps, envs, -1)[..., 0]
    if False in missing_next.values():
        mask[-1] = True
    return mask


def _fill_next(
    rollout: TensorDictBase,
    missing_next: Mapping[NestedKey, bool],
    bootstrap_mask: Tensor,
    successors: TensorDictBase | None,
) -> None:
    rows, (steps, envs) = bootstrap_mask.flatten().nonzero().squeeze(-1), rollout.shape
    terminated = rollout.get(TERMINATED)
    for key, episodic in missing_next.items():
        value = rollout.get(key)
        next_value = torch.cat((value[1:], torch.zeros_like(value[-1:])))
        if successors is not None:
            estimate = _check_finite(successors.get(key), next_key(key))
            targets = rows if episodic else rows[rows >= (steps - 1) * envs]
            next_value.flatten(0, 1)[targets] = (estimate if episodic else estimate[-envs:]).to(next_value)
        rollout.set(next_key(key), next_value.masked_fill(terminated, 0) if episodic else next_value)


def is_recurrent(keys: Collection[NestedKey], recurrent_keys: Collection[NestedKey]) -> bool:
    """Return True if one of the keys belongs to a recurrent state."""
    return any(is_below(key, state) for key in keys for state in recurrent_keys)


def flat_entries(data: TensorDictBase, keys: Collection[NestedKey], rows: Tensor | None = None) -> TensorDict:
    """Flatten the entries ``keys`` of data ``[T, N]``, if they exist; ``rows`` selects rows of the result."""
    out = TensorDict({}, [data.numel() if rows is None else len(rows)])
    for key in keys:
        value = data.get(key, None)
        if value is not None:
            flat = value.flatten(0, 1)
            out.set(key, flat if rows is None else flat[rows])
    return out


def run_on_sequences(
    module: TensorDictModuleBase, rollout: TensorDictBase, bootstrap_mask: Tensor, recurrent_keys: Collection[NestedKey]
) -> tuple[TensorDictBase, TensorDictBase]:
    """Run a recurrent module over the sequence of each environment, including the successors in ``bootstrap_mask``.

    Each sequence begins with the first stored state. A successor is inserted after its step, so that the module reads
    the successor with the state of all earlier steps. Later steps do not read this state, because a new episode begins
    after the successor or the rollout ends.

    Returns:
        The results of the steps ``[T, N]``, and of the successors in the order of ``bootstrap_mask.nonzero()``.
    """
    steps, envs = rollout.shape
    time = torch.arange(steps, device=bootstrap_mask.device).unsqueeze(1)
    step_position = time + bootstrap_mask.cumsum(0) - bootstrap_mask.long()
    source_index = torch.zeros(
        int((step_position + bootstrap_mask).max()) + 1, envs, dtype=torch.long, device=bootstrap_mask.device
    )
    source_index.scatter_(0, step_position, time.expand(steps, envs))
    row, env = bootstrap_mask.nonzero(as_tuple=True)
    successor_position = step_position[row, env] + 1
    source_index[successor_position, env] = row + steps
    column = torch.arange(envs, device=bootstrap_mask.device).expand_as(source_index)
    padded = TensorDict({}, source_index.shape)
    for key in dict.fromkeys((*module.in_keys, "is_init")):
        value = rollout.get(key, None)
        if value is None:
            continue
        if key == "is_init":
            following = torch.zeros_like(value)
        elif is_recurrent([key], recurrent_keys):
            following = value  # sequences() reads only the first step's state
        else:
            following = _successor_entry(rollout, key)
        padded.set(key, torch.cat((value, following))[source_index, column])
    out = run_module(module, sequences(padded, recurrent_keys=recurrent_keys), recurrent=True).transpose(0, 1)
    return out[step_position, column[:steps]], out[successor_position, env]


def _successor_entry(rollout: TensorDictBase, key: NestedKey) -> Any:
    value = rollout.get("next").get(key, None)
    if value is None:
        raise KeyError(f'The rollout must have ("next", {key!r}) for bootstrapping, because the critic reads {key!r}.')
    return value


def run_on_successors(module: TensorDictModuleBase, rollout: TensorDictBase, rows: Tensor) -> TensorDictBase:
    """Run a module on the successor states of flat rows, with ``is_init=False``."""
    for key in module.in_keys:
        if key != "is_init" and rollout.get(key, None) is not None:
            _successor_entry(rollout, key)
    source = flat_entries(rollout.get("next"), module.in_keys, rows)
    if "is_init" in module.in_keys:
        source.set("is_init", torch.zeros(len(rows), 1, dtype=torch.bool, device=rows.device))
    return run_module(module, source)


def run_module(
    module: Any, source: TensorDictBase, recurrent: bool = False, call: Callable[[TensorDictBase], Any] | None = None
) -> Any:
    """Run a module on its device in evaluation mode without gradients; return the result on the input's device."""
    data_device, module_device = device_in(source), device_of(module)
    inputs = source if module_device is None or data_device == module_device else source.to(module_device)
    with torch.no_grad(), EvaluationMode(module), set_recurrent_mode(recurrent):
        out = (call or module)(inputs)
    return out if out is None or module_device is None or data_device == module_device else out.to(data_device)


def current_log_prob(
    rollout: TensorDictBase,
    actor: Any,
    action_key: NestedKey = "action",
    recurrent_keys: Collection[NestedKey] = RECURRENT_KEYS,
) -> Tensor:
    """Return ``log π(a|s)``, ``[T, N]``, of the stored actions; the actor must have ``get_dist``."""
    get_dist = PolicyApi.of(actor).get_dist
    if get_dist is None:
        raise TypeError(
            f"actor must have a method get_dist(td), like TorchRL's ProbabilisticActor, got {type(actor).__name__}."
        )
    recurrent = is_recurrent(actor.in_keys, recurrent_keys)
    keys = [*actor.in_keys, action_key]
    if recurrent:
        source = sequences(rollout.select(*keys, "is_init", strict=False), recurrent_keys=recurrent_keys)
    else:
        source = flat_entries(rollout, keys)
    log_prob: Tensor = run_module(actor, source, recurrent, lambda data: get_dist(data).log_prob(data.get(action_key)))
    return log_prob.transpose(0, 1) if recurrent else log_prob.unflatten(0, rollout.batch_size)


def require_module(module: Any, name: str, purpose: str) -> Any:
    """Return the module; raise RuntimeError if it is None."""
    if module is None:
        raise RuntimeError(f"{name} is None, but is needed {purpose}. Pass {name}=... or assign .{name}.")
    return module


def _check_finite(value: Tensor, key: NestedKey) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"The values of the critic must be finite, got NaN or infinity in {key!r}.")
    return value
