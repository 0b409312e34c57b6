"""Networks that run on the parameters of a TorchRL loss, and the updaters of its target parameters."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import torch
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torchrl.objectives import HardUpdate, LossModule, SoftUpdate

from torchrl_lightning.entries import path_of

Module = TypeVar("Module", bound=nn.Module)


def on_parameters(network: Module, parameters: TensorDictParams) -> Module:
    """Return a copy of a network that computes with the given parameter tensors.

    TorchRL swaps a network's parameters at each call, which costs more than a small network. Here it is done once:
    moving a loss to a device keeps its tensor objects, so the copy follows.

    Args:
        network: Defines the computation.
        parameters: As ``TensorDict.from_module(network)`` lays them out.

    Example:
        >>> from tensordict import TensorDict
        >>> network = nn.Linear(2, 1)
        >>> parameters = TensorDictParams(TensorDict.from_module(nn.Linear(2, 1)).data, no_convert=True)
        >>> on_parameters(network, parameters).weight is parameters["weight"]
        True
    """
    copy = deepcopy(network)
    for key, tensor in parameters.items(True, True):
        *path, name = path_of(key)
        owner: Any = copy.get_submodule(".".join(path))
        (owner._parameters if name in owner._parameters else owner._buffers)[name] = tensor
    for module in copy.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]
    return copy.requires_grad_(False) if not _trains(parameters) else copy


def _trains(parameters: TensorDictParams) -> bool:
    return any(tensor.requires_grad for tensor in parameters.values(True, True))


class FusedSoftUpdate(SoftUpdate):
    r"""TorchRL's ``SoftUpdate`` in one call: \(\bar\theta \leftarrow \bar\theta + \tau (\theta - \bar\theta)\).

    Args:
        loss: A loss with target parameters.
        tau: Share of the online parameters.
    """

    def __init__(self, loss: LossModule, *, tau: float) -> None:
        super().__init__(loss, tau=tau)
        self._pairs: tuple[list[Tensor], list[Tensor]] | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the target parameters."""
        if self._pairs is None:
            sources = dict(self._sources.items(True, True))
            targets = {
                (key[0].removeprefix("target_"), *key[1:]): value for key, value in self._targets.items(True, True)
            }
            self._pairs = [targets[key] for key in sources], list(sources.values())
        torch._foreach_lerp_(*self._pairs, 1.0 - self.eps)


def build_updater(loss: LossModule, tau: float) -> SoftUpdate | HardUpdate:
    """Return the updater that moves target parameters by a fraction ``tau``; with 1 it copies them.

    Raises:
        ValueError: ``tau`` is not in (0, 1].
    """
    if not 0.0 < tau <= 1.0:
        raise ValueError(f"tau={tau} must be in (0, 1]: 1 copies the online parameters, smaller values follow them")
    return HardUpdate(loss, value_network_update_interval=0) if tau == 1.0 else FusedSoftUpdate(loss, tau=tau)
