"""Updates of perceptrons without autograd: what all agents whose gradients are written down have in common.

Forward and backward run over the parameters where they lie, products by numpy, and what lies between them by kernels.
What makes an update is the module as long as it is more than that: another network, loss or strategy, or a hook.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from numpy.typing import NDArray
from torch import Tensor, nn

from torchrl_lightning.kernels import perceptron_gradients as kernels
from torchrl_lightning.kernels.compiled import PACKAGE, jitted
from torchrl_lightning.learn.compiled_layers import Watch, defines_both, is_plain, linear_layers
from torchrl_lightning.learn.flat_parameters import addresses

Array = NDArray[Any]
Memory = list[Array]
Slopes = dict[tuple[int, int], Array]
"""Memory for gradients on their way down, which nobody reads behind a backward pass, so that networks may share it."""
Gradients = Mapping[Any, Tensor]
DISTANCES = {"l1": kernels.L1, "l2": kernels.L2, "smooth_l1": kernels.SMOOTH_L1}
_NO_SUMS = np.empty(0, np.float32)


class Perceptron:
    """A perceptron over the memory of its parameters.

    Args:
        layers: Weight ``[in, out]``, bias ``[out]`` and number of the activation of each.
        gradients: Where those of weight and bias go, in the same shapes; none for a network that does not learn.
    """

    def __init__(self, layers: Sequence[tuple[Array, Array, int]], gradients: Sequence[tuple[Array, Array]]) -> None:
        self.layers, self.gradients = list(layers), list(gradients)
        self._finish, self._pull_back = jitted(kernels.add_and_activate), jitted(kernels.pull_back)
        self._slopes: Memory = []  # of what the layers read

    def memory(self, rows: int, slopes: Slopes | None = None) -> Memory:
        """Return memory for what the layers return; gradients go through ``slopes``, of as many rows."""
        shared: Slopes = {} if slopes is None else slopes
        # A layer reads those of the layer above, and those of its own it writes.
        places = [(number % 2, len(weight)) for number, (weight, _, _) in enumerate(self.layers)]
        self._slopes = [shared.setdefault(place, np.empty((rows, place[1]), np.float32)) for place in places]
        return [np.empty((rows, len(bias)), np.float32) for _, bias, _ in self.layers]

    def forward(self, x: Array, memory: Memory) -> Array:
        """Compute what the layers return of ``[B, F]``, into memory; return that of the last one."""
        for (weight, bias, activation), out in zip(self.layers, memory, strict=True):
            np.dot(x, weight, out=out)
            self._finish(out, bias, activation)
            x = out
        return x

    def backward(self, x: Array, memory: Memory, d: Array, every: Array) -> None:
        """Write the gradients of the parameters, by that ``[B, O]`` of what was returned; ``every`` are all rows."""
        for number in reversed(range(len(self.layers))):
            (weight, _, activation), (to_weight, to_bias) = self.layers[number], self.gradients[number]
            self._pull_back(d, memory[number], every, activation, to_bias)
            below = memory[number - 1] if number else x
            if to_weight.flags.c_contiguous:
                np.dot(below.T, d, out=to_weight)
            else:  # it lies as [out, in]
                np.dot(d.T, below, out=to_weight.T)
            if number:
                d = np.dot(d, weight.T, out=self._slopes[number])

    def backward_to(self, memory: Memory, rows: Array, d: Array, last: int) -> Array:
        """Return the gradient of the last inputs of some rows ``[n]``, by that ``[n, O]`` of what was returned."""
        for number in reversed(range(len(self.layers))):
            weight, _, activation = self.layers[number]
            self._pull_back(d, memory[number], rows, activation, _NO_SUMS)
            if not number:
                return np.dot(d, weight[-last:].T)
            d = np.dot(d, weight.T, out=self._slopes[number][: len(d)])
        return d


def of_modules(trunk: Any, modules: Sequence[nn.Module | None], gradients: Gradients | None = None) -> Perceptron:
    """Return a trunk, and what lies behind it, as a perceptron; a ValueError if it is none."""
    linear, activations = linear_layers(trunk, modules)
    layers = [
        (array_of(layer.weight).T, array_of(layer.bias), kind) for layer, kind in zip(linear, activations, strict=True)
    ]
    if gradients is None:
        return Perceptron(layers, [])
    return Perceptron(layers, [(gradients[each.weight].numpy().T, gradients[each.bias].numpy()) for each in linear])


def vectors_of(entries: Sequence[Tensor]) -> Array:
    """Return the vectors ``[B, F_i]`` of an observation as networks read them: float32, side by side, ``[B, F]``."""
    found = [entry.to(torch.float32) for entry in entries]
    return (torch.cat(found, -1) if len(found) > 1 else found[0].contiguous()).numpy()


def array_of(parameter: Tensor) -> Array:
    """Return a parameter's memory; a ValueError if kernels cannot read it."""
    if not is_plain(parameter):
        raise ValueError("Only contiguous float32 on the CPU is read.")
    return parameter.detach().numpy()


class HandGradients(ABC):
    """The gradients of an agent's loss on batches of a number of rows.

    Args:
        watched: The modules whose parts must stay what they are now.

    Attributes:
        resting: The parameters without a gradient.
    """

    def __init__(self, rows: int, *watched: nn.Module) -> None:
        self.rows, self.watched = rows, watched
        self.resting: set[nn.Parameter] = set()
        self.every = np.arange(rows)

    @abstractmethod
    def __call__(self, batch: Any) -> Any:
        """Write the gradients on a batch; return what the agent makes of it, its ``terms`` among it."""


class UpdatesByHand:
    """Writes the gradients of a module's updates as long as the module makes nothing else of them.

    Args:
        module: The agent. Its method ``rows_by_hand(batch)`` says of how many rows a batch is, or None where it is none
            whose gradients are known; ``by_hand(gradients, rows)`` gives the :class:`HandGradients`.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._known: HandGradients | None = None
        self._watch: Watch | None = None
        self._parameters: list[nn.Parameter] = []
        self._learning: list[nn.Parameter] = []
        self._addresses: list[int] = []
        self._refused = not _is_ours(module)

    def __call__(self, batch: Any) -> Any:
        """Write the gradients on a batch, as ``module.terms`` and ``backward`` do, and return what ``terms`` does.

        None, and nothing is written, where autograd must.
        """
        rows = None if self._refused else self._module.rows_by_hand(batch)
        if rows is None:
            return None
        if self._known is None or self._known.rows != rows or addresses(self._parameters) != self._addresses:
            self._build(rows)
        found = self._known
        if found is None or (self._watch is not None and not self._watch.holds()) or torch.is_anomaly_enabled():
            return None
        for each in self._learning:
            if not each.requires_grad or each._backward_hooks or each._post_accumulate_grad_hooks:
                return None
        terms = found(batch)
        for group in self._module._groups.values():
            group.offer(found.resting)
        return terms

    def _build(self, rows: int) -> None:
        module, self._known = self._module, None
        gradients = {key: view for group in module._groups.values() for key, view in group.memory().items()}
        self._learning = [parameter for group in module._groups.values() for parameter in group.parameters]
        try:
            if any(parameter not in gradients for parameter in self._learning):
                raise ValueError("Not all parameters lie flat.")
            self._known = known = module.by_hand(gradients, rows)
        except ValueError:
            self._refused = True
            return
        self._watch = Watch(*known.watched)
        watched = (each for part in known.watched for each in part.parameters())
        self._parameters = list(dict.fromkeys([*self._learning, *watched]))
        self._addresses = addresses(self._parameters)


def _is_ours(module: Any) -> bool:
    """Return whether all that makes an update is known, and nobody is to be told of a backward pass."""
    trainer = module.trainer
    makes = [getattr(type(module), name).__module__ for name in ("training_step", "compute", "minimise", "update")]
    told = ("on_before_backward", "on_after_backward")
    listening = [
        name in vars(each) or getattr(type(each), name) not in (None, getattr(kind, name))
        for each, kind in [(module, LightningModule), *((callback, Callback) for callback in trainer.callbacks)]
        for name in told
    ]
    return (
        defines_both(module, "by_hand", "terms")
        and all(made.partition(".")[0] == PACKAGE for made in makes)
        and getattr(module, "memory", None) is None
        and not module.compiled
        and type(trainer.strategy) is SingleDeviceStrategy
        and trainer.strategy.root_device.type == "cpu"
        and trainer.precision == "32-true"
        and not any(listening)
    )
