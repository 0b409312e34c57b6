"""Weights from a file, compared with the networks that they are for before these take any memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def check_weights(make: Callable[[], nn.Module], stored: Mapping[str, Any], *, own: bool = False) -> None:
    """Refuse weights that networks do not have, lack, or have in other sizes, and those that are no numbers.

    Args:
        make: Builds the networks. They are built without memory, so that a file cannot ask for more than it brings.
        stored: What holds the weights as ``state_dict``.
        own: Whether they may be built in memory where they cannot be without: those of a class of the user's.

    Raises:
        ValueError: The weights do not fit; the message names the first that differs.
    """
    weights = stored.get("state_dict")
    if not isinstance(weights, Mapping):
        raise ValueError("it holds no weights (no state_dict)")
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                networks = make()
        except Exception as error:
            if not own:
                raise ValueError(f"its networks cannot be built: {' '.join(str(error).split())[:300]}") from error
            networks = make()
    states = (weights, networks.state_dict())
    there, here = ({name: list(getattr(each, "shape", [])) for name, each in state.items()} for state in states)
    differ = [
        f"{name} is {there.get(name, 'absent')} in the checkpoint and {here.get(name, 'absent')} in this run"
        for name in dict.fromkeys((*there, *here))
        if there.get(name) != here.get(name)
    ]
    if differ:
        more = f" (and {len(differ) - 1} more weights)" if len(differ) > 1 else ""
        raise ValueError(f"the networks differ: {differ[0]}{more}.")
    check_finite(networks, weights)


def check_finite(networks: nn.Module, weights: Mapping[str, Any]) -> None:
    """Refuse weights for learnt parameters that are infinite or no numbers, by a ValueError that names the first."""
    for name, _ in networks.named_parameters():
        weight = weights.get(name)
        if isinstance(weight, Tensor) and not torch.isfinite(weight).all():
            raise ValueError(f"the weights {name} are not finite: the run diverged, or the file was changed")
