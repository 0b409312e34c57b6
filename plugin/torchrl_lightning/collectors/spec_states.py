"""Specs as plain data, so that a checkpoint can carry them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded

from torchrl_lightning.collectors.specs import EnvironmentSpecs


def specs_state(specs: EnvironmentSpecs) -> dict[str, Any]:
    """Return an environment's specs as tensors and scalars, which ``torch.load(weights_only=True)`` reads.

    Example:
        >>> specs = EnvironmentSpecs(Composite(observation=Unbounded(4)), Categorical(2), 8)
        >>> specs_from_state(specs_state(specs)) == specs
        True
    """
    return {
        "observation": spec_state(specs.observation),
        "action": spec_state(specs.action),
        "num_envs": specs.num_envs,
    }


def specs_from_state(state: Mapping[str, Any]) -> EnvironmentSpecs:
    """Return the specs that :func:`specs_state` wrote."""
    observation, action = spec_from_state(state["observation"]), spec_from_state(state["action"])
    return EnvironmentSpecs(observation, action, int(state["num_envs"]))


def spec_state(spec: TensorSpec) -> dict[str, Any]:
    """Return one spec as tensors and scalars.

    Raises:
        TypeError: It is of a kind that no environment of ours has.
    """
    if isinstance(spec, Composite):
        return {"kind": "Composite", "entries": {str(key): spec_state(entry) for key, entry in spec.items()}}
    state: dict[str, Any] = {"shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch.")}
    # The exact class: TorchRL derives some kinds of spec from others.
    match type(spec).__name__.removesuffix("Continuous").removesuffix("Discrete"):
        case "Unbounded":
            return {"kind": "Unbounded", **state}
        case "Bounded":
            return {"kind": "Bounded", "low": spec.space.low.clone(), "high": spec.space.high.clone(), **state}
        case "Binary":
            return {"kind": "Binary", **state}
        case "Categorical":
            return {"kind": "Categorical", "n": int(spec.n), **state}
        case "MultiCategorical":
            return {"kind": "MultiCategorical", "nvec": spec.nvec.tolist(), **state}
    raise TypeError(f"a {type(spec).__name__} spec cannot be kept in a checkpoint: {spec}")


def spec_from_state(state: Mapping[str, Any]) -> Any:
    """Return the spec that :func:`spec_state` wrote.

    Raises:
        ValueError: It is of an unknown kind.
    """
    kind = state["kind"]
    if kind == "Composite":
        return Composite({key: spec_from_state(entry) for key, entry in state["entries"].items()})
    shape, dtype = torch.Size(state["shape"]), getattr(torch, state["dtype"])
    match kind:
        case "Unbounded":
            return Unbounded(shape, dtype=dtype)
        case "Bounded":
            return Bounded(state["low"], state["high"], shape, dtype=dtype)
        case "Binary":
            return Binary(shape[-1], shape=shape, dtype=dtype)
        case "Categorical":
            return Categorical(state["n"], shape=shape, dtype=dtype)
        case "MultiCategorical":
            return MultiCategorical(state["nvec"], shape=shape, dtype=dtype)
    raise ValueError(f"unknown kind of spec {kind!r}; resume or load with the release that wrote it")
