"""Policies in collectors: how to call them, and their device, recurrent states and weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs import TensorDictPrimer
from torchrl.modules.utils import get_primers_from_module

from torchrl_lightning._core.modules import device_of
from torchrl_lightning._core.protocols import PolicyApi
from torchrl_lightning._core.torchrl_compat import forward_hooks
from torchrl_lightning._core.tree import path_of, raw_items
from torchrl_lightning.environments.actions import ActionFormat
from torchrl_lightning.environments.env_errors import EnvironmentFault

Policy = Callable[[TensorDictBase], TensorDictBase]
Outputs = Mapping[NestedKey, Tensor]
"""Output entries of a policy: tensors ``[N, *]``, without private keys."""


def clips_actions(policy: object) -> bool:
    """Return whether a policy requires clipped actions; policies that ``load_policy`` returned may require them."""
    return PolicyApi.of(policy).clip_actions is True


def fast_call(policy: object) -> Callable[[TensorDictBase], Outputs] | None:
    """Return a policy's ``compute_step``; None if it is missing, or would bypass a hook or an overridden ``forward``.

    ``compute_step(step)`` returns the policy's outputs for ``step`` ``[N]``, including ``("next", state)`` of recurrent
    states, and writes nothing. The actions depend on ``exploration_type()``. A direct call avoids TensorDict's
    dispatch, which takes half of a small network's time. The next step overwrites the entries of ``step``, so copy the
    entries that you keep.
    """
    if isinstance(policy, nn.Module) and any(forward_hooks(policy)):
        return None
    if "forward" in getattr(policy, "__dict__", ()):
        return None
    for cls in type(policy).__mro__:
        if "compute_step" in cls.__dict__:
            compute_step: Callable[[TensorDictBase], Outputs] = policy.compute_step  # type: ignore[attr-defined]
            return compute_step
        if "forward" in cls.__dict__ or "__call__" in cls.__dict__:
            return None
    return None


def bound_call(policy: object, step: TensorDictBase) -> Callable[[], Outputs] | None:
    """Return a function that applies a policy's ``compute_step`` to one step of CPU tensors; None without this method.

    The caller overwrites the tensors of the step between calls. If the policy has a method ``bind_inputs(step)``, this
    method builds the function, which may return the same tensors each time. Else the function calls
    ``compute_step(step)``. Before each call, check with :func:`fast_call` that ``compute_step`` still applies.
    """
    call = fast_call(policy)
    if call is None:
        return None
    for cls in type(policy).__mro__:
        if "bind_inputs" in cls.__dict__ and "bind_inputs" not in getattr(policy, "__dict__", ()):
            bound: Callable[[], Outputs] = policy.bind_inputs(step)  # type: ignore[attr-defined]
            return bound
        if "compute_step" in cls.__dict__:
            break
    return lambda: call(step)


def policy_device(policy: object) -> torch.device:
    """Return the device of the policy's first parameter or buffer, or the CPU if it has none."""
    return device_of(policy) or torch.device("cpu")


def recurrent_states(policy: object, num_envs: int) -> dict[NestedKey, Tensor]:
    """Return the initial recurrent states that the policy's submodules declare by ``make_tensordict_primer``.

    Each has shape ``[num_envs, *state]``. Raise ValueError if an initial state is not constant.
    """
    states: dict[NestedKey, Tensor] = {}
    for primer in recurrent_primers(policy):
        for key, spec in primer.primers.items(include_nested=True, leaves_only=True):
            default = primer.default_value
            value = default.get(key, 0.0) if isinstance(default, Mapping) else default
            if primer.random or callable(value):
                raise ValueError(
                    f"The initial recurrent state {key!r} must be constant, got a random or computed value. "
                    "Set default_value of its primer to a number."
                )
            # A primer may already have batch dimensions; the trailing dimensions are the state of one environment.
            shape = spec.shape[len(primer.primers.shape) :]
            states[unravel_key(key)] = torch.full((num_envs, *shape), value or 0.0, dtype=spec.dtype)
    return states


def dotted_name(key: NestedKey) -> str:
    """Return a key as one name with dots, for a state dict."""
    return ".".join(path_of(key))


def expand_mask(rows: Tensor, value: Tensor) -> Tensor:
    """Return flags ``[N]`` as ``[N, 1, ...]``, with the number of dimensions of values ``[N, *F]``."""
    return rows.view(-1, *[1] * (value.ndim - 1))


def recurrent_primers(policy: object) -> list[TensorDictPrimer]:
    """Return the primers for recurrent states of the policy's submodules; they are float64 for a float64 policy."""
    if not isinstance(policy, nn.Module):
        return []
    primers = get_primers_from_module(policy, warn=False)
    transforms: list[TensorDictPrimer] = [] if primers is None else list(getattr(primers, "transforms", [primers]))
    if transforms and is_float64(policy):
        for primer in transforms:  # TorchRL makes float32 primers, also for a float64 module
            specs = primer.primers = primer.primers.clone()
            for key, spec in list(specs.items(include_nested=True, leaves_only=True)):
                specs[key] = spec.to(torch.float64) if spec.dtype.is_floating_point else spec
    return transforms


def is_float64(policy: object) -> bool:
    """Return whether a policy has float64 parameters, so that it writes float64 actions."""
    return isinstance(policy, nn.Module) and any(value.dtype is torch.float64 for value in policy.parameters())


def apply_policy(policy: Policy, step: TensorDictBase, device: torch.device, form: ActionFormat) -> TensorDictBase:
    """Call the policy on its device and write its outputs into a step of a TorchRL environment.

    If ``form.clip`` is true, all actions are clipped to their bounds. Otherwise only an action that exceeds its bound
    by rounding is set to the bound.

    Raises:
        KeyError: The policy writes no action.
        EnvironmentFault: An observation that the policy reads is not finite.
        ValueError: The actions are NaN.
    """
    env_device = step.device or torch.device("cpu")
    outputs = policy(step if env_device == device else step.to(device))
    action = outputs.get("action", None)
    if action is None:
        raise KeyError("The policy does not write 'action'. Add it to the policy's out_keys.")
    if action.is_floating_point() and bool(action.isnan().any()):
        inputs = {key: step.get(key) for key in PolicyApi.of(policy).in_keys}
        check_finite({f"observation {key!r}": value for key, value in inputs.items() if value is not None})
        raise ValueError(
            "The policy returned NaN actions: its weights are not finite. Check the learning rate and the gradient "
            "norm."
        )
    if form.is_box and form.is_network_format and action.dtype is torch.float32:
        bounded = form.to_environment(action)
        if not torch.equal(bounded, action):
            outputs.set("action", bounded)
    if outputs is not step:
        step.update(outputs if env_device == device else outputs.to(env_device))
    return step


def check_finite(values: Mapping[str, Tensor], rollout: bool = False) -> None:
    """Validate that named values of a TorchRL environment are finite; raise EnvironmentFault if one is not.

    For values of a ``rollout``, ``[N, T, *F]``, the message also names the step and the environment.
    """
    for name, value in values.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            index = (~value.isfinite()).nonzero()[0].tolist()
            subject = f"At step {index[1]} of the rollout, environment {index[0]}" if rollout else "the environment"
            raise EnvironmentFault(
                f"{subject} returned {name} with {value[tuple(index)].item()}, expected finite numbers. Fix the "
                "environment or the transform that computes it."
            )


def load_weights(policy: object, weights: object) -> None:
    """Copy weights into the policy in place, from a module, a state dict or a TensorDict of parameters.

    ``None``, or the policy itself, changes nothing. Raise TypeError for other types.
    """
    if weights is None or weights is policy:
        return
    if not isinstance(policy, nn.Module):
        raise TypeError(f"The policy must be an nn.Module to update its weights, got {type(policy).__name__}.")
    state: Mapping[str, Any]
    if isinstance(weights, nn.Module):
        state = weights.state_dict()
    elif isinstance(weights, TensorDictBase):
        state = {".".join(path_of(key)): value for key, value in weights.items(include_nested=True, leaves_only=True)}
    elif isinstance(weights, Mapping):
        state = weights
    else:
        raise TypeError(f"weights must be a module, a state dict or a TensorDict, got {type(weights).__name__}.")
    policy.load_state_dict(dict(state))


def check_policy(policy: object) -> None:
    """Validate a policy; raise TypeError if it is not callable, or is a plain torch module that reads tensors."""
    if policy is not None and not callable(policy):
        raise TypeError(f"policy must map a TensorDict to a TensorDict, got {type(policy).__name__}.")
    # A policy may lack in_keys. Plain torch layers cannot read a TensorDict, unless a submodule has in_keys.
    is_plain = isinstance(policy, nn.Linear | nn.Sequential)
    if isinstance(policy, nn.Module) and is_plain and not any(hasattr(part, "in_keys") for part in policy.modules()):
        raise TypeError(
            f"policy must read a TensorDict, got {type(policy).__name__}, which reads tensors. Wrap it in "
            "tensordict.nn.TensorDictModule(policy, in_keys=['observation'], out_keys=['action'])."
        )


def policy_outputs(policy: Policy, step: TensorDictBase) -> dict[NestedKey, Tensor]:
    """Call a policy and return the entries that it wrote, except keys with a leading underscore."""
    before = _leaves(step)
    result: object = policy(step)
    if not isinstance(result, TensorDictBase):
        raise TypeError(
            f"The policy must return a TensorDict, got {type(result).__name__}. Wrap it in "
            "tensordict.nn.TensorDictModule(policy, in_keys=['observation'], out_keys=['action'])."
        )
    outputs: dict[NestedKey, Tensor] = {}
    for key, value in _leaves(result).items():
        if before.get(key) is value or _is_private(key):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"The policy must write {key!r} as a tensor, got {type(value).__name__}.")
        outputs[key] = value
    return outputs


def default_outputs(
    policy: Policy, step: TensorDictBase, device: torch.device, states: Collection[NestedKey]
) -> dict[NestedKey, Tensor]:
    """Return zeros for the policy's outputs except the action and ``states``, for steps with random actions.

    Steps with random actions then have the same entries as steps of the policy, as in TorchRL's collectors.
    """
    out_keys = PolicyApi.of(policy).out_keys
    excluded = {"action", *states}
    if out_keys is not None and {unravel_key(key) for key in out_keys} <= excluded:
        return {}
    outputs = policy_outputs(policy, step.to(device) if step.device != device else step.copy())
    return {key: torch.zeros_like(value, device="cpu") for key, value in outputs.items() if key not in excluded}


def _leaves(data: TensorDictBase) -> dict[NestedKey, Any]:
    leaves: dict[NestedKey, Any] = {}
    for name, value in raw_items(data).items():
        if type(value) is Tensor or not isinstance(value, TensorDictBase):  # the first check is ten times faster
            leaves[name] = value
        else:
            leaves.update({(name, *path_of(key)): leaf for key, leaf in _leaves(value).items()})
    return leaves


def _is_private(key: NestedKey) -> bool:
    return key.startswith("_") if isinstance(key, str) else any(name.startswith("_") for name in path_of(key))
