"""Values and log-probabilities of a rollout: which steps a critic must see, and in one batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.modules import set_recurrent_mode

from torchrl_lightning._compat import new_tensordict
from torchrl_lightning._modules import EvaluationMode, device_of
from torchrl_lightning.rollout.layout import leaves_of
from torchrl_lightning.rollout.sequences import sequences
from torchrl_lightning.rollout.storage import flatten_tree
from torchrl_lightning.rollout.writer import DONE, TERMINATED

RECURRENT_KEYS: tuple[NestedKey, ...] = ("recurrent_state",)


def path(key: NestedKey) -> tuple[str, ...]:
    """The key as a tuple of strings."""
    return (key,) if isinstance(key, str) else tuple(key)


def under(key: NestedKey, root: NestedKey) -> bool:
    """Whether ``key`` is ``root`` or nested below it."""
    return path(key)[: len(path(root))] == path(root)


def join(root: NestedKey, suffix: tuple[str, ...]) -> NestedKey:
    """``root`` extended by ``suffix``; a plain string where it can be."""
    joined = path(root) + suffix
    return joined[0] if len(joined) == 1 else joined


def value_keys(data: TensorDictBase, critic: TensorDictModuleBase | None, root: NestedKey) -> list[NestedKey]:
    """All value entries at or below ``root``, one for each critic."""
    keys = [] if critic is None else [join(key, ()) for key in critic.out_keys if under(key, root)]
    return keys or [key for key, _ in leaves_of(data) if under(key, root)]


def boundaries(rollout: TensorDictBase) -> Tensor:
    """Where the trace ends: ``done``, or the next stored step starts an episode although this one did not end."""
    done = rollout.get(DONE)
    start = rollout.get("is_init", None)
    if start is None or start.shape != done.shape:
        return done
    cut = done.clone()
    cut[:-1] |= start[1:]
    return cut


@torch.no_grad()
def fill_values(
    rollout: TensorDictBase,
    critic: TensorDictModuleBase | None,
    roots: Mapping[NestedKey, bool],
    *,
    known: Callable[[NestedKey], bool],
    recurrent_keys: Collection[NestedKey] = RECURRENT_KEYS,
    unroll: bool = False,
) -> None:
    """Write the values of all steps and of their successors on a time-major rollout.

    ``V'[t]`` is ``V[t+1]``; the critic sees ``("next", ...)`` only where that is another episode's state: on truncated
    rows and on the last ones, in one batch. Terminated rows get 0.

    Args:
        rollout: ``[T, N]``; gets ``root`` and ``("next", root)``.
        critic: writes the values; may be ``None`` where all of them are known.
        roots: value keys, and whether the stream is episodic (a non-episodic one looks across episode ends).
        known: whether an entry of the rollout may be used as it is.
        recurrent_keys: root keys of recurrent states.
        unroll: run a recurrent critic over whole sequences from the first state, not from each stored state.

    Raises:
        RuntimeError: values are needed and there is no critic.
        KeyError: the critic does not write ``root``, or reads something that a successor state does not have.
        ValueError: the critic returned NaN or infinite values.
    """
    keys = {root: value_keys(rollout, critic, root) for root in roots}
    for root, found in keys.items():
        if not found and critic is None:
            raise RuntimeError(
                f"Values {root!r} are needed, the rollout has none and there is no critic: assign one "
                "(critic=... or buffer.critic = ...), or let the policy write them."
            )
        if not found:
            raise KeyError(f"The critic writes {list(critic.out_keys)}, not {root!r}.")  # type: ignore[union-attr]
    every = [key for found in keys.values() for key in found]
    stale = [key for key in every if not known(key)]
    if stale:
        out = run_on_steps(require(critic, "critic", f"to compute {stale}"), rollout, recurrent_keys, unroll)
        for key in stale:
            rollout.set(key, _checked(out.get(key), key))
    _fill_next(rollout, critic, {r: (keys[r], episodic) for r, episodic in roots.items()}, known, recurrent_keys)


def _fill_next(
    rollout: TensorDictBase,
    critic: TensorDictModuleBase | None,
    roots: Mapping[NestedKey, tuple[list[NestedKey], bool]],
    known: Callable[[NestedKey], bool],
    recurrent_keys: Collection[NestedKey],
) -> None:
    steps, envs = rollout.shape
    terminated = rollout.get(TERMINATED)
    stopped = terminated.reshape(steps, envs, -1)[..., 0]
    episodic = boundaries(rollout).reshape(steps, envs, -1)[..., 0].clone()
    episodic[-1] = True
    episodic &= ~stopped
    wanted = [(k, e) for found, e in roots.values() for k in found if not known(("next", *path(k)))]
    if not wanted:
        return
    need = episodic if any(e for _, e in wanted) else torch.zeros_like(episodic)
    if any(not e for _, e in wanted):
        need = need.clone()
        need[-1] = True
    rows = need.flatten().nonzero().squeeze(-1)
    out = None
    if rows.numel():
        out = run_on_successors(
            require(critic, "critic", "for the successors of truncated and last steps"), rollout, rows, recurrent_keys
        )
    for key, ends in wanted:
        value = rollout.get(key)
        following = torch.cat((value[1:], torch.zeros_like(value[-1:])))
        if out is not None:
            estimate = _checked(out.get(key), ("next", *path(key)))
            pick = rows if ends else rows[rows >= (steps - 1) * envs]
            following.flatten(0, 1)[pick] = (estimate if ends else estimate[-envs:]).to(following)
        rollout.set(("next", *path(key)), following.masked_fill(terminated, 0) if ends else following)


def run_on_steps(
    module: TensorDictModuleBase, rollout: TensorDictBase, recurrent_keys: Collection[NestedKey], unroll: bool
) -> TensorDictBase:
    """Run a module on every step; the result is ``[T, N]``."""
    recurrent = any(under(key, state) for key in module.in_keys for state in recurrent_keys)
    if recurrent and unroll:
        out = run(module, _select(rollout, module.in_keys, recurrent_keys), recurrent=True)
        return out.transpose(0, 1)
    flat = rollout.batch_size.numel()
    source = new_tensordict({}, torch.Size([flat]))
    for key in module.in_keys:
        value = rollout.get(key, None)
        if isinstance(value, TensorDictBase):
            source.set(key, new_tensordict(flatten_tree(value), source.batch_size))
        elif value is not None:
            source.set(key, value.flatten(0, 1))
    return run(module, source).unflatten(0, rollout.batch_size)


def _select(rollout: TensorDictBase, keys: Collection[NestedKey], recurrent_keys: Collection[NestedKey]) -> TensorDict:
    return sequences(rollout.select(*keys, "is_init", strict=False), recurrent_keys=recurrent_keys)


def run_on_successors(
    module: TensorDictModuleBase, rollout: TensorDictBase, rows: Tensor, recurrent_keys: Collection[NestedKey]
) -> TensorDictBase:
    """Run a module on the successor states of flat rows; they never start an episode."""
    following = rollout.get("next")
    source = TensorDict({}, [rows.shape[0]])
    for key in module.in_keys:
        value = following.get(key, None)
        if key == "is_init":
            source.set(key, torch.zeros(rows.shape[0], 1, dtype=torch.bool, device=rows.device))
        elif value is not None:
            source.set(key, value.flatten(0, 1)[rows] if isinstance(value, Tensor) else value.reshape(-1)[rows])
        elif rollout.get(key, None) is not None:
            raise KeyError(f'The critic reads {key!r}, but the rollout has no ("next", {key!r}) to bootstrap from.')
    return run(module, source)


def run(module: TensorDictModuleBase, source: TensorDictBase, recurrent: bool = False) -> TensorDictBase:
    """Run a module in evaluation mode where its parameters are and bring the result back, without gradients."""
    home, there = _device_of(source), device_of(module)
    moved = source if there is None or home == there else source.to(there)
    with torch.no_grad(), EvaluationMode(module), set_recurrent_mode(recurrent):
        out = module(moved)
    return out if out is None or there is None or home == there else out.to(home)


@torch.no_grad()
def current_log_prob(
    rollout: TensorDictBase,
    actor: Any,
    action_key: NestedKey = "action",
    recurrent_keys: Collection[NestedKey] = RECURRENT_KEYS,
) -> Tensor:
    """``log π(a|s)`` of the stored actions under the current actor, ``[T, N]``.

    Raises:
        TypeError: the actor has no ``get_dist``.
    """
    if not hasattr(actor, "get_dist"):
        raise TypeError(
            f"The actor must offer get_dist(td) as TorchRL's ProbabilisticActor does, got {type(actor).__name__}."
        )
    recurrent = any(under(key, state) for key in actor.in_keys for state in recurrent_keys)
    keys = [*actor.in_keys, action_key]
    if recurrent:
        source: TensorDictBase = _select(rollout, keys, recurrent_keys)
    else:
        source = new_tensordict(
            flatten_tree(rollout.select(*keys, strict=False)), torch.Size([rollout.batch_size.numel()])
        )
    home, there = _device_of(source), device_of(actor)
    if there is not None and there != home:
        source = source.to(there)
    with EvaluationMode(actor), set_recurrent_mode(recurrent):
        log_prob = actor.get_dist(source).log_prob(source.get(action_key)).to(home)
    return log_prob.transpose(0, 1) if recurrent else log_prob.unflatten(0, rollout.batch_size)


def require(module: Any, name: str, purpose: str) -> Any:
    """Return the module.

    Raises:
        RuntimeError: it is ``None``.
    """
    if module is None:
        raise RuntimeError(f"The {name} is needed {purpose}, but there is none: pass {name}=... or assign .{name}.")
    return module


def _checked(value: Tensor, key: NestedKey) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"The critic returned NaN or infinite values for {key!r}.")
    return value


def _device_of(data: TensorDictBase) -> torch.device | None:
    for value in data.values(include_nested=True, leaves_only=True):
        return torch.device(value.device)
    return None
