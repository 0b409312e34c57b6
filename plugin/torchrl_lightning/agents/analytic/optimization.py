"""Flatten the parameters of a network, so that a step needs one operation, and run Adam without torch's bookkeeping."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch import optim as o
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torchrl_lightning._core.torchrl_compat import foreach_lerp_
from torchrl_lightning.agents.analytic.perceptrons import addresses
from torchrl_lightning.agents.optimizer_states import check_adam_state


def _uncompiled(method: Callable[..., Any]) -> Any:
    """Remove torch's compiler guard from a method until the compiler is imported, because the import takes 1.7 s."""
    plain = inspect.unwrap(method)

    @wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (method if "torch._dynamo" in sys.modules else plain)(self, *args, **kwargs)

    return call


_SETTINGS = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
_settings_of = itemgetter(*_SETTINGS)


class FusedAdam(o.Adam):
    """``torch.optim.Adam(fused=True)`` with the same results and state in less time.

    In each step, torch adds a profiler label, runs hooks, checks CUDA graphs and groups parameters by device. This
    takes 60 to 100 us. The step of a small network with flat parameters takes only 10 us. With hooks or a gradient
    scaler, torch's own step is used. The class takes the arguments of torch's Adam.
    """

    add_param_group = _uncompiled(o.Adam.add_param_group)
    state_dict = _uncompiled(o.Adam.state_dict)
    _load_state_dict = _uncompiled(o.Adam.load_state_dict)
    zero_grad = _uncompiled(o.Adam.zero_grad)

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, eps: float = 1e-8) -> None:
        super().__init__(params, lr=lr, eps=eps, fused=True)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load an optimizer state.

        Raises:
            ValueError: Structure, shape, dtype or layout of the state do not fit this optimizer. The optimizer is then
                unchanged.
        """
        check_adam_state(self, state_dict)
        self._load_state_dict(state_dict)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step. Return the result of ``closure``, which computes the gradients, or None without ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hooks = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        if (
            any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))
            or "found_inf" in vars(self)
            or not all(map(_is_plain, self.param_groups))
        ):
            torch_step = o.Adam.step
            if not getattr(torch_step, "hooked", False):
                torch_step = o.Optimizer.profile_hook_step(torch_step)
            torch_step(self)
            return loss
        with torch.no_grad():
            for group in self.param_groups:
                columns: tuple[list[Tensor], ...] = [], [], [], [], [], []
                self._init_group(group, *columns)
                if columns[0]:
                    torch._foreach_add_(columns[-1], 1)
                    beta1, beta2 = group["betas"]
                    settings = dict(zip(_SETTINGS, _settings_of(group), strict=True))
                    torch._fused_adam_(*columns, beta1=beta1, beta2=beta2, **settings)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # without it, torch wraps the step with its label and hooks


def _is_plain(group: dict[str, Any]) -> bool:
    first, *others = group["params"]
    is_fused_adam = group["fused"] and not group["decoupled_weight_decay"]
    return is_fused_adam and not (others and any(parameter.device != first.device for parameter in others))


# Elementwise optimizers give the same result for one flat parameter. Subclasses of these types are excluded, because
# they may differ.
_ELEMENTWISE = (FusedAdam, o.Adam, o.AdamW, o.SGD, o.RMSprop, o.Adamax, o.NAdam, o.RAdam, o.Adadelta, o.Rprop, o.ASGD)


class OptimizedParameters:
    """The parameters of one optimizer, flattened if the optimizer is elementwise.

    An elementwise optimizer, such as torch's Adam, AdamW, SGD and RMSprop, updates one flat parameter for each of the
    ``parts``. The parameters of a part are trained together. Parameters in ``unflattenable`` are not flattened. The
    same applies to the parameters of other optimizers and of optimizers that have already made a step. The parameter
    objects and their names in a state dict stay the same. Between ``clear`` and ``gather``, each parameter has its own
    gradient. Code that computes, reduces or drops gradients then works as usual. Within a part, a missing gradient
    counts as zero. A part without any gradient is not stepped.
    """

    def __init__(
        self,
        optimizer: o.Optimizer,
        parts: Sequence[Sequence[nn.Parameter]],
        unflattenable: Iterable[nn.Parameter] = (),
    ) -> None:
        self.parameters = [parameter for part in parts for parameter in part]
        self._segments: list[_Segment] = []
        if type(optimizer) in _ELEMENTWISE and not optimizer.state:
            part_of = {parameter: number for number, part in enumerate(parts) for parameter in part}
            excluded = {*unflattenable, *(parameter for parameter in part_of if not parameter.requires_grad)}
            for group in optimizer.param_groups:
                segments = [_Segment(members) for members in _group_by_layout(group["params"], excluded, part_of)]
                flat = {parameter for segment in segments for parameter in segment.parameters}
                others = [parameter for parameter in group["params"] if parameter not in flat]
                group["params"] = [*(segment.flat for segment in segments), *others]
                self._segments += segments
        self._stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def clear(self) -> None:
        """Set all gradients to None before a backward pass."""
        for parameter in self.parameters:
            parameter.grad = None

    def gather(self) -> None:
        """Pass the gradients to the optimizer after a backward pass."""
        for segment in self._segments:
            segment.gather()

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradient tensor of each flattened parameter, to be filled before ``publish_gradients``."""
        return {
            parameter: view
            for segment in self._segments
            for parameter, view in zip(segment.parameters, segment.refresh(), strict=True)
        }

    def publish_gradients(self, idle: set[nn.Parameter]) -> None:
        """Pass the written gradients to the optimizer; segments with only ``idle`` parameters get None."""
        for segment in self._segments:
            segment.publish(None if idle.issuperset(segment.parameters) else segment.gradient)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gathered gradients to a norm of at most ``max_norm``; return the norm before scaling."""
        gradients = [parameter.grad for parameter in self._stepped if parameter.grad is not None]
        if len(gradients) != 1:
            return nn.utils.clip_grad_norm_(self._stepped, max_norm)
        # This gives the same result without torch's bookkeeping for many tensors.
        norm = torch.linalg.vector_norm(gradients[0])
        if not norm.is_cpu or not float(norm) <= max_norm - 1e-6:  # reading the norm would synchronise a GPU
            gradients[0].mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
        return norm


class _Segment:
    """Parameters that the optimizer steps as one flat parameter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = nn.Parameter(torch.empty(0))
        self._addresses: list[int] = []
        self.refresh()

    def refresh(self) -> Sequence[Tensor]:
        """Flatten the parameters again if they have moved; return each parameter's view of the flat gradient."""
        if addresses(self.parameters) != self._addresses:
            self.flat.data = _flatten(self.parameters)
            self._addresses = addresses(self.parameters)
            self.gradient = torch.zeros_like(self.flat)
            self._gradients = _views(self.gradient, self.parameters)
        return self._gradients

    def publish(self, gradient: Tensor | None) -> None:
        """Set the gradients of all parameters to views of the flat gradient, or to None."""
        for parameter, view in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = None if gradient is None else view
        self.flat.grad = gradient

    def gather(self) -> None:
        """Copy the parameters' gradients into the flat gradient."""
        pairs = zip(self.refresh(), self.parameters, strict=True)
        present = [(view, parameter.grad) for view, parameter in pairs if parameter.grad is not None]
        if not present:
            self.flat.grad = None
            return
        if len(present) < len(self.parameters):
            self.gradient.zero_()
        torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
        self.flat.grad = self.gradient


class SoftUpdate:
    """Soft update of a target module's parameters from the online parameters.

    The target parameters are flattened. Online and target parameters that are adjacent in memory are updated in one
    operation.
    """

    def __init__(self, module: nn.Module, online: Sequence[nn.Parameter]) -> None:
        self._module, self._online, self._targets = module, list(online), list(module.parameters())
        self._addresses: list[int] = []
        self._adjacent_runs: tuple[list[Tensor], list[Tensor]] = [], []

    def __call__(self, tau: float) -> None:
        """Move the target parameters towards the online parameters by a fraction ``tau``."""
        if addresses([*self._online, *self._targets]) != self._addresses:
            for members in _group_by_layout(self._targets, unflattenable_parameters(self._module)):
                _flatten(members)
            self._adjacent_runs = _merge_adjacent(self._online, self._targets)
            self._addresses = addresses([*self._online, *self._targets])
        foreach_lerp_(self._adjacent_runs[1], self._adjacent_runs[0], tau)


def unflattenable_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that must keep their memory layout, which cuDNN defines for recurrent layers."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    return {parameter for layer in layers for parameter in layer.parameters() if parameter.is_cuda}


@torch.no_grad()
def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype and device into a new flat tensor, and turn them into views of the flat tensor."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    for tensor, view in zip(tensors, _views(flat, tensors), strict=True):
        tensor.data = view
    return flat


def _views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _group_by_layout(
    parameters: Iterable[nn.Parameter], excluded: set[nn.Parameter], parts: Mapping[nn.Parameter, int] | None = None
) -> list[list[nn.Parameter]]:
    """Group the parameters that fit into one tensor (same part, dtype and device); skip excluded parameters."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if type(parameter) is nn.Parameter and parameter.is_contiguous() and parameter not in excluded:
            layout = (parts or {}).get(parameter), parameter.dtype, parameter.device
            groups.setdefault(layout, []).append(parameter)
    return list(groups.values())


def _merge_adjacent(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Merge tensors that are adjacent in memory in both lists into flat views, and return the two lists."""
    runs: list[list[tuple[Tensor, Tensor]]] = []
    for pair in zip(left, right, strict=True):
        if runs and all(map(_is_adjacent, runs[-1][-1], pair)):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    sides = tuple([_span([pair[side].detach() for pair in run]) for run in runs] for side in (0, 1))
    return sides[0], sides[1]


def _is_adjacent(before: Tensor, after: Tensor) -> bool:
    layouts = [(t.dtype, t.untyped_storage().data_ptr(), t.is_contiguous()) for t in (before, after)]
    is_next = before.storage_offset() + before.numel() == after.storage_offset()
    return is_next and layouts[0] == layouts[1] and before.is_contiguous()


def _span(run: list[Tensor]) -> Tensor:
    return run[0] if len(run) == 1 else run[0].as_strided((sum(tensor.numel() for tensor in run),), (1,))
