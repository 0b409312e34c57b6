"""Check that weights from a file fit their networks, before memory is allocated for the networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lightning._core.file_limits import BUILT_LEAST, BUILT_PER_BYTE, OPERATIONS_LEAST, OPERATIONS_PER_WEIGHT
from torchrl_lightning._core.torchrl_compat import TorchDispatchMode, tree_leaves, tree_map

# Prefixes of the actor's entries in a state dict: ``_ACTOR`` in our agents, the other in agents with TorchRL losses.
_ACTOR = "actor_network."
_ACTORS = (_ACTOR, "loss.actor_network_params.")
_TARGET_NETWORKS = "targets"  # attribute with an agent's target networks


def check_weights(build_networks: Callable[[], nn.Module], stored: Mapping[str, Any], *, own: bool = False) -> None:
    """Validate that stored weights are finite and have the names and sizes of the networks.

    Args:
        build_networks: Function that builds the networks. It runs without memory for tensors, so that a file cannot
            cause an allocation that exceeds its size.
        stored: Mapping with the weights as ``state_dict``.
        own: Whether to build the networks in memory if they cannot be built without memory, for example with user
            classes.

    Raises:
        ValueError: The weights do not fit; the message names the first difference.
    """
    weights = _stored_weights(stored)
    networks = _build_bounded(build_networks, own, weights)
    _check_same_shapes(weights, networks.state_dict(), "the networks differ")
    check_finite(networks, weights)


def initial_weights(
    build_networks: Callable[[], nn.Module], stored: Mapping[str, Any], *, own: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return initial weights for networks from stored weights, and the names of parts that keep their random weights.

    If the weights are from the same learner, all are returned. From another learner, only the actor's weights are
    returned, renamed for these networks. Both learners must then have an actor, and the networks must not have target
    networks or a TorchRL loss.

    Args:
        build_networks: See :func:`check_weights`.
        stored: Mapping with the weights as ``state_dict``.
        own: See :func:`check_weights`.

    Raises:
        ValueError: The weights do not fit; the message names the first difference.
    """
    weights = _stored_weights(stored)
    networks = _build_bounded(build_networks, own, weights)
    expected = networks.state_dict()
    part_names = [dict.fromkeys(name.partition(".")[0] for name in names) for names in (weights, expected)]
    root = next((root for root in _ACTORS if any(name.startswith(root) for name in weights)), None)
    if (
        part_names[0].keys() == part_names[1].keys()
        or root is None
        or not part_names[1].keys().isdisjoint((_TARGET_NETWORKS, "loss"))
    ):
        _check_same_shapes(weights, expected, "the networks differ")
        check_finite(networks, weights)
        return dict(weights), []
    # TorchRL's losses save buffers, although buffers depend on the environment.
    buffer_names = {name for name, _ in networks.named_buffers()}
    actor = {_ACTOR + name.removeprefix(root): weight for name, weight in weights.items() if name.startswith(root)}
    actor = {name: weight for name, weight in actor.items() if name in expected or name not in buffer_names}
    _check_same_shapes(
        actor, {name: weight for name, weight in expected.items() if name.startswith(_ACTOR)}, "the actors differ"
    )
    check_finite(networks, actor)
    random_parts = sorted(
        {name.partition(".")[0] for name, _ in networks.named_parameters() if not name.startswith(_ACTOR)}
    )
    return actor, random_parts


def _stored_weights(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    weights = stored.get("state_dict")
    if not isinstance(weights, Mapping):
        raise ValueError("it contains no weights (state_dict)")
    return weights


def _build_bounded(build_networks: Callable[[], nn.Module], own: bool, weights: Mapping[str, Any]) -> nn.Module:
    with torch.random.fork_rng(devices=[]), bounded_tensors(weights):
        reason: Exception
        try:
            with torch.device("meta"):
                return build_networks()
        except TooManyTensorsError as error:
            raise ValueError(f"the networks differ: {error}") from error
        except Exception as error:
            if isinstance(error.__cause__, TooManyTensorsError):
                raise ValueError(f"the networks differ: {error.__cause__}") from error
            reason = error
        try:
            if own:  # a user's network may read values while it is built
                return build_networks()
        except RuntimeError as error:
            reason = error
        raise ValueError(f"its networks cannot be built: {' '.join(str(reason).split())[:300]}") from reason


class TooManyTensorsError(ValueError):
    """Modules make more tensors, or larger tensors, than expected for their stored weights."""


class bounded_tensors(TorchDispatchMode):  # used as a context, like torch.no_grad
    """Raise :class:`TooManyTensorsError` before modules make more or larger tensors than expected for stored weights.

    The limits allow a few temporary tensors for the initialisation of each weight, and copies as target networks.

    Args:
        weights: The stored weights.
    """

    def __init__(self, weights: Any) -> None:
        super().__init__()
        # A file may contain any value in place of weights; the later comparison rejects this value.
        entries = weights.values() if isinstance(weights, Mapping) else ()
        tensors = [tensor for tensor in entries if isinstance(tensor, Tensor)]
        self.stored = sum(tensor.nbytes for tensor in tensors)
        self.bytes_left = BUILT_PER_BYTE * self.stored + BUILT_LEAST
        self.others_left = 4 * self.bytes_left
        self.operations_left = OPERATIONS_PER_WEIGHT * len(tensors) + OPERATIONS_LEAST

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation and the bytes of its new tensors before the operation runs."""
        kwargs = kwargs or {}
        self.operations_left -= 1
        if self.operations_left < 0:
            raise TooManyTensorsError("the config builds many more parts than the checkpoint has weights")
        schema = func._schema
        if schema.is_mutable or any(item.alias_info is not None for item in schema.returns):
            return func(*args, **kwargs)  # allocates nothing
        is_factory = any(item.name == "device" for item in schema.arguments)
        shapes = _on_meta(func, args, {**kwargs, "device": torch.device("meta")} if is_factory else kwargs)
        largest = max(shapes, key=lambda item: item.nbytes, default=None)
        if largest is None:
            return func(*args, **kwargs)
        size = sum(item.nbytes for item in shapes)
        if is_factory:
            self.bytes_left -= size
        else:
            self.others_left -= size
        if min(self.bytes_left, self.others_left) < 0:
            raise TooManyTensorsError(
                f"the config builds tensors such as {list(largest.shape)}, many times the {self.stored} bytes of the "
                "stored weights"
            )
        return func(*args, **kwargs)


def _on_meta(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the results of an operation on the meta device; an empty list if the operation depends on values."""

    def without_memory(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    arguments = {key: value for key, value in tree_map(without_memory, kwargs).items() if key != "pin_memory"}
    try:
        results = func(*tree_map(without_memory, args), **arguments)
    except (RuntimeError, NotImplementedError, TypeError):
        return []
    return [result for result in tree_leaves(results) if isinstance(result, Tensor)]


def _check_same_shapes(weights: Mapping[str, Any], networks: Mapping[str, Any], subject: str) -> None:
    stored_shapes, shapes = (
        {name: list(getattr(tensor, "shape", [])) for name, tensor in state.items()} for state in (weights, networks)
    )
    differences = [
        f"{name} is {stored_shapes.get(name, 'absent')} in the checkpoint and {shapes.get(name, 'absent')} in this run"
        for name in dict.fromkeys((*stored_shapes, *shapes))
        if stored_shapes.get(name) != shapes.get(name)
    ]
    if differences:
        others = f" (and {len(differences) - 1} more weights)" if len(differences) > 1 else ""
        raise ValueError(f"{subject}: {differences[0]}{others}.")


def check_finite(networks: nn.Module, weights: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first learnt parameter with infinite or NaN weights."""
    for name, _ in networks.named_parameters():
        weight = weights.get(name)
        if isinstance(weight, Tensor) and not torch.isfinite(weight).all():
            raise ValueError(f"the weights {name} are not finite: the run diverged, or the file was changed")
