"""Validate stored optimizer states against a run's optimizers before anything is loaded.

torch's fused kernels index the moments by the size of the parameters. With a moment of another size, the kernels would
read and write outside the moment's memory. :meth:`torch.optim.Optimizer.load_state_dict` compares only the number of
parameters.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrl_lightning._core.checksums import is_dense_tensor
from torchrl_lightning._core.file_limits import OPTIMIZER_COUNT, OPTIMIZER_STEPS

_REMEDY = "Resume from another checkpoint, or start again without ckpt_path"
_SCHEDULER_SETTINGS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names"}
_NUMBER_ENTRIES = {"H_diag", "t", "prev_loss"}  # LBFGS stores them as numbers or as tensors
_TRIAL_ITERATIONS = 4  # enough to fill the history of LBFGS
_STATE_KEYS = {"state", "param_groups"}


def check_optimizer_states(optimizers: Sequence[Optimizer], states: Any) -> None:
    """Compare a checkpoint's states with the states of these optimizers after a trial step.

    The trial step changes the optimizers and their parameters, so both must be copies.

    Raises:
        ValueError: A state does not fit; the message names the first value that differs.
    """
    if not isinstance(states, list | tuple) or len(states) != len(optimizers):
        count = len(states) if isinstance(states, list | tuple) else f"a {type(states).__name__}"
        raise ValueError(f"optimizer_states must be {len(optimizers)} states, got {count}. {_REMEDY}.")
    names = [f"optimizer_states[{number}]" for number in range(len(states))]
    for name, optimizer, state in zip(names, optimizers, states, strict=True):
        groups = check_param_groups(optimizer, state, name)
        _compare_states(_trial_step(optimizer, groups, name), state, name)
    _check_no_shared_memory(states)


def check_adam_state(optimizer: Optimizer, state: Any) -> None:
    """Validate a state of an Adam-like optimizer against its parameters' shapes; raise a ValueError if it differs."""
    name = f"the state of {type(optimizer).__name__}"
    groups = check_param_groups(optimizer, state, name)
    expected = []
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if stored.get("amsgrad") else [])]
        for parameter in group["params"]:
            step = torch.zeros((), dtype=torch.float32)
            expected.append({"step": step, **dict.fromkeys(moments, parameter.detach())})
    _compare_states(expected, state, name)
    _check_no_shared_memory([state])


def check_param_groups(optimizer: Optimizer, state: Any, name: str) -> list[Mapping[str, Any]]:
    """Validate the parameter groups of a state and return them without their parameters."""
    if not isinstance(state, Mapping) or not set(state) >= _STATE_KEYS:
        raise ValueError(f"{name} must contain 'state' and 'param_groups', as torch writes them. {_REMEDY}.")
    groups, expected = state["param_groups"], optimizer.param_groups
    if (
        not isinstance(groups, list)
        or len(groups) != len(expected)
        or not all(isinstance(group, Mapping) for group in groups)
    ):
        count = f"{len(groups)} entries" if isinstance(groups, list) else f"a {type(groups).__name__}"
        raise ValueError(f"{name}['param_groups'] must be {len(expected)} dicts, got {count}. {_REMEDY}.")
    ids: list[Any] = []
    for number, (stored, group) in enumerate(zip(groups, expected, strict=True)):
        where = f"{name}['param_groups'][{number}]"
        params = stored.get("params")
        if not isinstance(params, list) or len(params) != len(group["params"]):
            count = f"{len(params)}" if isinstance(params, list) else f"a {type(params).__name__}"
            raise ValueError(f"{where}['params'] must be {len(group['params'])} numbers, got {count}. {_REMEDY}.")
        ids += params
        for key, value in stored.items():
            if key == "params":
                continue
            if key not in group and key not in _SCHEDULER_SETTINGS:
                raise ValueError(
                    f"{where} has the setting {key!r}, which {type(optimizer).__name__} does not have. {_REMEDY}."
                )
            if not _is_setting(value, group.get(key, 0.0 if key != "param_names" else [])):
                raise ValueError(f"{where}[{key!r}] must be like {group.get(key)!r:.80}, got {value!r:.80}. {_REMEDY}.")
        betas = stored.get("betas")
        if betas is not None and not all(isinstance(beta, Tensor) or 0 <= beta < 1 for beta in betas):
            raise ValueError(f"{where}['betas'] must be from 0 to below 1, got {betas!r:.80}. {_REMEDY}.")
    if not all(type(number) is int for number in ids) or len(set(ids)) != len(ids):
        raise ValueError(f"{name}['param_groups'] must contain a different integer for each parameter. {_REMEDY}.")
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _is_setting(value: Any, expected: Any) -> bool:
    """Return whether the type of a stored setting fits this run's setting."""
    if isinstance(expected, Tensor) or isinstance(value, Tensor):
        return _is_number(value) and (isinstance(expected, Tensor) or _is_number(expected)) and _is_scalar(value)
    if isinstance(expected, list | tuple):
        if expected and not isinstance(expected[0], str):
            has_same_length = isinstance(value, list | tuple) and len(value) == len(expected)
            return has_same_length and all(map(_is_setting, value, expected))
        return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    if value is None or expected is None or isinstance(expected, bool) or isinstance(value, bool):
        return value is None or isinstance(value, bool) or (expected is None and (_is_number(value) or _is_text(value)))
    if isinstance(expected, str):
        return _is_text(value)
    return _is_number(value) and (not isinstance(expected, int) or value <= OPTIMIZER_COUNT)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) < OPTIMIZER_COUNT


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or (is_dense_tensor(value) and value.ndim == 0)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_dense_tensor(value) and value.numel() == 1 and bool(value.isfinite())
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _trial_step(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Make one step with stored settings on copied parameters and return the new state of each parameter."""
    parameters: list[nn.Parameter] = []
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        group.update(stored)
        if "max_iter" in group:
            group["max_iter"], group["max_eval"] = _TRIAL_ITERATIONS, 2 * _TRIAL_ITERATIONS
        parameters += group["params"]
    try:
        with torch.random.fork_rng(devices=[]):
            for number, parameter in enumerate(parameters):  # the gradients of these values are not zero
                parameter.data = torch.full_like(parameter, 1.0 + number, memory_format=torch.preserve_format)
            optimizer.step(lambda: _quadratic(parameters))  # type: ignore[arg-type, return-value]
    except Exception as error:  # settings from a file may raise any error
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{name} has settings with which {type(optimizer).__name__} cannot step: {type(error).__name__}: {reason}. "
            f"{_REMEDY}."
        ) from error
    finally:
        for parameter in parameters:
            parameter.grad = None
    return [optimizer.state[parameter] for parameter in parameters]


@torch.no_grad()
def _quadratic(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Write the gradients of a quadratic function, and return its value."""
    for number, parameter in enumerate(parameters, 1):
        parameter.grad = parameter.detach() / number
    return torch.stack([parameter.detach().double().square().sum() for parameter in parameters]).sum()


def _compare_states(expected: Sequence[Mapping[str, Any]], state: Mapping[str, Any], name: str) -> None:
    ids = [number for group in state["param_groups"] for number in group["params"]]
    stored = state["state"]
    if not isinstance(stored, Mapping):
        raise ValueError(f"{name}['state'] must be a dict, got a {type(stored).__name__}. {_REMEDY}.")
    if unknown_keys := [key for key in stored if key not in ids]:
        raise ValueError(
            f"{name}['state'] has {unknown_keys[0]!r:.40}, which is not a parameter of this run. {_REMEDY}."
        )
    for number, parameter_state in zip(ids, expected, strict=True):
        entries, where = stored.get(number, {}), f"{name}['state'][{number}]"
        if not isinstance(entries, Mapping):
            raise ValueError(f"{where} must be a dict, got a {type(entries).__name__}. {_REMEDY}.")
        if not entries:  # the parameter has not had a gradient yet
            continue
        required = {key for key, value in parameter_state.items() if value is not None and not isinstance(value, list)}
        if not required <= set(entries) or not set(entries) <= set(parameter_state):
            raise ValueError(
                f"{where} must contain {', '.join(map(str, parameter_state)) or 'nothing'}, got "
                f"{', '.join(map(str, entries))[:200]}. {_REMEDY}."
            )
        for key, value in entries.items():
            _compare_entry(parameter_state[key], value, f"{where}[{key!r}]", key)


def _compare_entry(expected: Any, value: Any, where: str, key: str) -> None:
    if isinstance(expected, list) or isinstance(value, list):  # the history of LBFGS
        if not isinstance(expected, list) or not isinstance(value, list) or len(value) > OPTIMIZER_COUNT:
            raise ValueError(f"{where} must be {_describe(expected)}, got {_describe(value)}. {_REMEDY}.")
        expected_item = next((item for item in expected if item is not None), None)
        for number, item in enumerate(value):
            if item is not None:
                _compare_entry(expected_item, item, f"{where}[{number}]", key)
        return
    if isinstance(expected, Tensor) and expected.ndim:
        if not (
            isinstance(value, Tensor)
            and is_dense_tensor(value)
            and value.shape == expected.shape
            and value.dtype == expected.dtype
            and _strides(value) == _strides(expected)
        ):
            raise ValueError(f"{where} must be {_describe(expected)}, got {_describe(value)}. {_REMEDY}.")
        return
    if expected is None or value is None:
        is_valid = expected is value
    elif key == "step":
        is_valid = _is_scalar(value) and _is_number(value)
    elif key in _NUMBER_ENTRIES:
        is_valid = _is_scalar(value) and isinstance(value, Tensor | int | float)
    elif isinstance(expected, Tensor):
        is_valid = isinstance(value, Tensor) and _is_scalar(value) and value.dtype == expected.dtype
    else:
        is_valid = isinstance(value, int | float)
    if not is_valid:
        raise ValueError(f"{where} must be {_describe(expected)}, got {_describe(value)}. {_REMEDY}.")
    if key == "step" and not (0 <= (step := float(value)) <= OPTIMIZER_STEPS and step == int(step)):
        raise ValueError(f"{where} must be a number of steps up to {OPTIMIZER_STEPS}, got {step:g}. {_REMEDY}.")


def _strides(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value!r:.60}" if isinstance(value, bool | int | float | None) else f"a {type(value).__name__}"
    if not is_dense_tensor(value):
        return f"a tensor in the layout {value.layout}"
    if not value.ndim:
        return f"a number of {value.dtype}"
    return f"{list(value.shape)} of {value.dtype} with the strides {list(value.stride())}"


def _check_no_shared_memory(states: Sequence[Mapping[str, Any]]) -> None:
    """Validate that no two tensors of the states share memory, because a step would change both."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for state in states
        for entries in state["state"].values()
        for tensor in _tensors(list(entries.values()))
        if tensor.numel() and tensor.is_cpu
    )
    for (_, end), (begin, _) in pairwise(spans):
        if begin < end:
            raise ValueError(f"optimizer_states must not contain tensors that share memory. {_REMEDY}.")


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from _tensors(value)


def copy_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same type and settings over copied parameters, without state and hooks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memo: dict[int, Any] = {id(parameter): nn.Parameter(parameter.detach().clone()) for parameter in parameters}
    memo[id(optimizer.state)] = defaultdict(dict)
    copied: Optimizer = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":  # a scheduler has wrapped the original's method
            continue
        is_hook = name.startswith("_optimizer_") and name.endswith("_hooks")
        vars(copied)[name] = OrderedDict() if is_hook else copy.deepcopy(value, memo)
    return copied


def flatten_optimizers(configured: Any) -> list[Optimizer]:
    """Return the optimizers in a return value of ``configure_optimizers``."""
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return flatten_optimizers(configured.get("optimizer"))
    if isinstance(configured, list | tuple):
        return [optimizer for entry in configured for optimizer in flatten_optimizers(entry)]
    return []
