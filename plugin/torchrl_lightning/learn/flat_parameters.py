"""Parameters that lie one after the other in one tensor: one step, one norm and one copy for a whole network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch import optim as o

from torchrl_lightning.learn.adam import LeanAdam

# They treat each number alone, so that it does not matter where a parameter begins. Subclasses may do anything.
_ELEMENTWISE = (LeanAdam, o.Adam, o.AdamW, o.SGD, o.RMSprop, o.Adamax, o.NAdam, o.RAdam, o.Adadelta, o.Rprop, o.ASGD)


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Return where tensors lie; they move with their module, and when a state dict is assigned."""
    return list(map(Tensor.data_ptr, tensors))


@torch.no_grad()
def lay_flat(tensors: Sequence[Tensor]) -> Tensor:
    """Move the values of tensors of one type and device into one new tensor, of which they become views."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    for tensor, view in zip(tensors, _views(flat, tensors), strict=True):
        tensor.data = view
    return flat


def _views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def settled_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that must stay where they lie: cuDNN lays those of a recurrent layer out in its own way."""
    layers = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    return {parameter for layer in layers for parameter in layer.parameters() if parameter.is_cuda}


def alike(
    parameters: Iterable[nn.Parameter], settled: Iterable[nn.Parameter], parts: Mapping[nn.Parameter, int] | None = None
) -> list[list[nn.Parameter]]:
    """Group the parameters that can lie in one tensor: by part, type and device, without the settled ones."""
    left_alone = set(settled)
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if type(parameter) is nn.Parameter and parameter.is_contiguous() and parameter not in left_alone:
            kind = (parts or {}).get(parameter), parameter.dtype, parameter.device
            groups.setdefault(kind, []).append(parameter)
    return list(groups.values())


def merged(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return two lists of tensors as few long ones: neighbours in both lists' memory become one flat view."""
    runs: list[list[tuple[Tensor, Tensor]]] = []
    for pair in zip(left, right, strict=True):
        if runs and all(_adjacent(before, after) for before, after in zip(runs[-1][-1], pair, strict=True)):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    sides = tuple([_span([pair[side].detach() for pair in run]) for run in runs] for side in (0, 1))
    return sides[0], sides[1]


def _adjacent(before: Tensor, after: Tensor) -> bool:
    return (
        before.is_contiguous()
        and after.is_contiguous()
        and before.dtype == after.dtype
        and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.storage_offset() + before.numel() == after.storage_offset()
    )


def _span(run: list[Tensor]) -> Tensor:
    return run[0] if len(run) == 1 else run[0].as_strided((sum(tensor.numel() for tensor in run),), (1,))


class _Segment:
    """Parameters that are stepped as one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = nn.Parameter(torch.empty(0))
        self._lay()

    def _lay(self) -> None:
        self.flat.data = lay_flat(self.parameters)
        self._lie = addresses(self.parameters)
        self._gradient = torch.zeros_like(self.flat)
        self._gradients = _views(self._gradient, self.parameters)

    def settle(self) -> Sequence[Tensor]:
        """Follow parameters that have been moved; return the parts of the flat gradient, one for each."""
        if addresses(self.parameters) != self._lie:
            self._lay()
        return self._gradients

    def offer(self, resting: set[nn.Parameter]) -> None:
        """Take what was written into the flat gradient as the parameters' gradients, unless all of them rest."""
        rests = resting.issuperset(self.parameters)
        for parameter, view in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = None if rests else view
        self.flat.grad = None if rests else self._gradient

    def gather(self) -> None:
        """Copy the parameters' gradients into the flat one, and follow parameters that have been moved."""
        self.settle()
        views, present = [], []
        for view, parameter in zip(self._gradients, self.parameters, strict=True):
            if parameter.grad is not None:
                views.append(view)
                present.append(parameter.grad)
        if not present:
            self.flat.grad = None
            return
        if len(present) < len(self.parameters):
            self._gradient.zero_()
        torch._foreach_copy_(views, present)
        self.flat.grad = self._gradient


class OptimizedParameters:
    """The parameters of one optimizer, laid flat where it treats each number alone.

    Such an optimizer (torch's Adam, AdamW, SGD, RMSprop and the like), which has not stepped yet, then steps one flat
    parameter for each of the ``parts`` that are trained together, instead of many; any other one keeps the parameters
    as they are, and so do those in ``settled``. The parameters stay the objects that they were, with their names in a
    state dict. Between ``clear`` and ``gather`` a gradient is each parameter's own, so that whatever computes, reduces
    or drops gradients works as usual. Within a part, a parameter without a gradient counts as one whose gradient is
    zero; a part without any is not stepped.
    """

    def __init__(
        self, optimizer: o.Optimizer, parts: Sequence[Sequence[nn.Parameter]], settled: Iterable[nn.Parameter] = ()
    ) -> None:
        self.parameters = [parameter for part in parts for parameter in part]
        self._segments: list[_Segment] = []
        if type(optimizer) in _ELEMENTWISE and not optimizer.state:
            part_of = {parameter: number for number, part in enumerate(parts) for parameter in part}
            left_alone = {*settled, *(parameter for parameter in part_of if not parameter.requires_grad)}
            for group in optimizer.param_groups:
                segments = [_Segment(members) for members in alike(group["params"], left_alone, part_of)]
                flat = {parameter for segment in segments for parameter in segment.parameters}
                rest = [parameter for parameter in group["params"] if parameter not in flat]
                group["params"] = [*(segment.flat for segment in segments), *rest]
                self._segments += segments
        # What the optimizer steps.
        self._stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def clear(self) -> None:
        """Drop all gradients, before a backward pass."""
        for parameter in self.parameters:
            parameter.grad = None

    def gather(self) -> None:
        """Hand the gradients over to the optimizer, after a backward pass."""
        for segment in self._segments:
            segment.gather()

    def memory(self) -> dict[nn.Parameter, Tensor]:
        """Return where gradients may be written that are then offered, for each parameter that lies flat."""
        return {
            parameter: view
            for segment in self._segments
            for parameter, view in zip(segment.parameters, segment.settle(), strict=True)
        }

    def offer(self, resting: set[nn.Parameter]) -> None:
        """Hand over what was written into ``memory``: all of it, but for the parameters that rest."""
        for segment in self._segments:
            segment.offer(resting)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gathered gradients to a norm of at most ``max_norm``; return the norm before."""
        gradients = [parameter.grad for parameter in self._stepped if parameter.grad is not None]
        if len(gradients) != 1:
            return nn.utils.clip_grad_norm_(self._stepped, max_norm)
        # The same, without torch's bookkeeping for many tensors.
        norm = torch.linalg.vector_norm(gradients[0])
        if not norm.is_cpu or not float(norm) <= max_norm - 1e-6:  # a GPU is not asked: it would have to be waited for
            gradients[0].mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
        return norm
