"""A second device on any machine: tensors that claim another device, are computed on the CPU and never mix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

HERE, THERE = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten
# What takes tensors of both devices on a real accelerator too: copies, indices, the lengths of packed sequences.
TAKES_BOTH = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten._pack_padded_sequence.default,
    aten._pad_packed_sequence.default,
    aten.gru.data,
    aten.lstm.data,
}


class There(Tensor):
    """A CPU tensor that claims to lie on the other device."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> There:
        made = Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=THERE,
        )
        made.elem = elem.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU, and let the result lie where an accelerator would leave it."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, There)]
    if there and func not in TAKES_BOTH and any(not isinstance(t, There) and t.dim() for t in tensors):
        raise RuntimeError(f"{func} got tensors on two devices")
    device = kwargs.get("device")
    if device is not None:
        kwargs = {**kwargs, "device": HERE}
    if func is aten.copy_.default:
        goes_there = isinstance(args[0], There)
    else:
        goes_there = bool(there) if device is None else torch.device(device).type == THERE.type
    wrappers = {id(tensor.elem): tensor for tensor in there}
    out = func(*tree_map_only(There, unwrap, args), **tree_map_only(There, unwrap, kwargs))
    if not goes_there:
        return out
    if func is aten._pack_padded_sequence.default:
        return There(out[0]), out[1]
    return tree_map_only(Tensor, lambda tensor: wrappers[id(tensor)] if id(tensor) in wrappers else There(tensor), out)


def unwrap(tensor: There) -> Tensor:
    return tensor.elem


class SecondDevice(TorchDispatchMode):
    """Makes ``THERE`` a device on which tensors can be created, computed with and brought back from."""

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def move_there(module: nn.Module) -> nn.Module:
    """Move a module's parameters and buffers to the other device."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(There(parameter.detach()), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = There(buffer)
        if isinstance(part, nn.RNNBase):
            part._flat_weights = [part._parameters[name] for name in part._flat_weights_names]
    return module
