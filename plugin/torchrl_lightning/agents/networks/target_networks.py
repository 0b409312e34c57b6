"""Target networks: slowly updated copies of trained networks."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrl_lightning._core.modules import EvaluationMode
from torchrl_lightning._core.torchrl_compat import buffers_of, persistent_buffers
from torchrl_lightning.agents.analytic import SoftUpdate


class TargetNetworks(nn.Module):
    r"""The copies of networks with soft updates, \(\bar\theta \leftarrow \bar\theta + \tau (\theta - \bar\theta)\).

    The copies have the networks' names and no gradients. The networks themselves are not registered. Run the copies
    inside ``with targets.evaluation``, because Lightning warns about modules that are always in evaluation mode.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, network in networks.items():
            self.add_module(name, deepcopy(network).requires_grad_(False))
        online = [parameter for network in networks.values() for parameter in network.parameters()]
        self._soft_update = SoftUpdate(self, online)
        self._buffer_pairs: list[tuple[Any, nn.Module, str]] = [
            (target, source, name)
            for key, network in networks.items()
            for target, source in zip(self.get_submodule(key).modules(), network.modules(), strict=True)
            for name in persistent_buffers(target)
        ]
        self.evaluation = EvaluationMode(self)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @torch.no_grad()
    def soft_update(self, tau: float) -> None:
        """Move the copies' parameters towards the networks by a fraction ``tau``; 1 copies the parameters.

        Persistent buffers of the networks, such as running means, are copied.
        """
        self._soft_update(tau)
        for target, source, name in self._buffer_pairs:
            buffer = buffers_of(source)[name]
            if buffer is not None:
                buffers_of(target)[name].copy_(buffer)
