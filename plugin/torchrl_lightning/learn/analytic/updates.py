"""Updates without autograd: agents whose losses have gradients that are written down here, over perceptrons.

Products are numpy's; kernels compute what is between them. Parameters and gradients stay where they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from torchrl_lightning.learn.analytic import kernels
from torchrl_lightning.learn.analytic.perceptrons import (
    Array,
    Gradients,
    ModuleGuard,
    Unsupported,
    addresses,
    defining_class,
)

DISTANCES = {"l1": kernels.L1, "l2": kernels.L2, "smooth_l1": kernels.SMOOTH_L1}


class AnalyticUpdate(ABC):
    """The gradients of an agent's loss, written where its optimizers read them.

    Args:
        agent: Has a trainer and optimizers.

    Attributes:
        rows: The number of rows of a batch.
        every: The numbers of these rows.
        resting: The parameters without a gradient in this update.

    Raises:
        Unsupported: Autograd has to compute the gradients.
    """

    methods: ClassVar[tuple[str, ...]] = ("terms",)
    """The methods of the agent that are not called, because this computes the same."""

    def __init__(self, agent: Any) -> None:
        _check_run(agent, self.methods)
        self.agent = agent
        self.resting: set[nn.Parameter] = set()
        self._is_supported = True
        self._build(1)

    def __call__(self, batch: Any) -> Any:
        """Write the gradients on a batch, as ``agent.terms`` and ``backward`` do, and return what ``terms`` returns.

        None, and nothing is written, if autograd has to compute them.
        """
        rows = self.count(batch) if self._is_supported else None
        if rows is None:
            return None
        if rows != self.rows or list(map(Tensor.data_ptr, self._parameters)) != self._addresses:
            try:
                self._build(rows)
            except Unsupported:
                self._is_supported = False
                return None
        if not self._guard.unchanged() or torch.is_anomaly_enabled():
            return None
        for parameter in self._learning:
            if not parameter.requires_grad or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return None
        terms = self.write(batch)
        for group in self.agent._groups.values():
            group.publish_gradients(self.resting)
        return terms

    def _build(self, rows: int) -> None:
        groups = self.agent._groups.values()
        gradients = {key: view for group in groups for key, view in group.gradients().items()}
        self._learning = [parameter for group in groups for parameter in group.parameters]
        if any(parameter not in gradients for parameter in self._learning):
            raise Unsupported("Not all parameters are flat.")
        self.rows, self.every = rows, np.arange(rows)
        watched = self.bind(gradients)
        self._guard = ModuleGuard(*watched)
        parts = (each for part in watched for each in part.parameters())
        self._parameters = list(dict.fromkeys([*self._learning, *parts]))
        self._addresses = addresses(self._parameters)

    @abstractmethod
    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Find the networks and allocate memory for ``rows``; return the modules that must not change.

        Args:
            gradients: Where the gradient of each parameter goes.

        Raises:
            Unsupported: They are not perceptrons, or the loss has other parts.
        """

    @abstractmethod
    def count(self, batch: Any) -> int | None:
        """Return the number of rows of a batch; None if it has entries whose gradients are not known."""

    @abstractmethod
    def write(self, batch: Any) -> Any:
        """Write the gradients on a batch of ``rows``; return what the agent's ``terms`` returns."""


def vectors_of(entries: list[Tensor]) -> Array:
    """Return the vectors ``[B, F_i]`` of an observation as networks read them: float32, side by side, ``[B, F]``."""
    found = [entry.to(torch.float32) for entry in entries]
    return (torch.cat(found, -1) if len(found) > 1 else found[0].contiguous()).numpy()


def _check_run(agent: Any, methods: Sequence[str]) -> None:
    """Raise Unsupported if an update makes more than is known, or something waits for a backward pass."""
    trainer, hooks = agent.trainer, ("on_before_backward", "on_after_backward")
    if (
        any(is_overridden(hook, each) for each in (agent, *trainer.callbacks) for hook in hooks)
        or agent.compiled
        or not defining_class(agent, *methods, "training_step", "compute", "minimise", "update")
        or type(trainer.strategy) is not SingleDeviceStrategy
        or trainer.strategy.root_device.type != "cpu"
        or trainer.precision != "32-true"
    ):
        raise Unsupported("The run needs autograd.")
