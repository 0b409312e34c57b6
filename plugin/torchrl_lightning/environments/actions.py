"""The format of an environment's actions, and the only conversion between them and the actions of networks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from torchrl.data import Bounded, Categorical, TensorSpec, Unbounded
from torchrl.data.utils import numpy_to_torch_dtype_dict

from torchrl_lightning.kernels.bounds import set_to_bounds
from torchrl_lightning.kernels.compiled import jitted

Array = NDArray[Any]

ROUNDING = 1e-5
"""Largest excess over a bound that counts as float32 rounding of a network, relative to the larger bound."""
HALF_ROUNDING = 2e-2  # the same for 16-bit numbers
_HALF = frozenset({np.dtype(np.float16), torch.float16, torch.bfloat16})
_LARGE = float(2**62)  # floating-point numbers up to this size fit int64


@dataclass(frozen=True, eq=False)
class ActionFormat:
    """Shape, dtype, bounds and numbering of the actions that an environment takes.

    Networks compute in float32, count choices from 0 in int64, and use shape ``[1]`` for a scalar. Buffers store the
    networks' actions. :meth:`to_environment` converts them for the environment.

    Attributes:
        shape: Shape of one action.
        dtype: NumPy dtype of an action.
        start: The environment's first discrete action, one number for each part of a MultiDiscrete action; 0 for a Box.
        low: Lower bounds of a Box, with ``shape`` and ``dtype``; None for discrete actions.
        high: Upper bounds.
        spec_shape: Shape of one action of a network.
        clip: Whether :meth:`to_environment` clips actions to their Box.

    Examples:
        >>> form = ActionFormat.from_space(spaces.Box(-1, 1, (), np.float16))
        >>> form.to_environment(np.array([[0.5], [1.000001], [2.0]], np.float32))
        array([0.5, 1. , 2. ], dtype=float16)
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int | tuple[int, ...] = 0
    low: Array | None = None
    high: Array | None = None
    spec_shape: tuple[int, ...] = ()
    clip: bool = False

    @classmethod
    def from_space(cls, space: spaces.Space[Any]) -> ActionFormat:
        """Return the format of a Gymnasium space."""
        shape, dtype = space.shape or (), np.dtype(space.dtype)
        if isinstance(space, spaces.Box):
            return cls(shape, dtype, 0, space.low, space.high, shape or (1,))  # TorchRL gives scalars a dimension
        return cls(shape, dtype, first_action(space), spec_shape=shape)

    @classmethod
    def from_spec(cls, spec: TensorSpec, start: int | tuple[int, ...] = 0) -> ActionFormat:
        """Return the format that a TorchRL spec of one action describes."""
        shape, dtype = tuple(spec.shape), torch.empty(0, dtype=spec.dtype).numpy().dtype
        if isinstance(spec, Bounded):
            low, high = (bound.expand(spec.shape).cpu().numpy().copy() for bound in (spec.space.low, spec.space.high))
        elif isinstance(spec, Unbounded) and dtype.kind != "b":
            limits = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            low, high = (np.full(shape, limit, dtype) for limit in limits)
        else:
            return cls(shape, dtype, start, spec_shape=shape)
        return cls(shape, dtype, start, low, high, shape)

    @property
    def is_box(self) -> bool:
        """Whether the actions have bounds; some may be infinite."""
        return self.low is not None

    @property
    def is_network_format(self) -> bool:
        """Whether networks use the environment's shape, dtype and numbering; only rounding then changes actions."""
        is_same = self.dtype in (np.float32, np.int64, np.bool_) and self.shape == self.spec_shape
        return is_same and not self.start

    @cached_property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = numpy_to_torch_dtype_dict[self.dtype]
        return dtype

    @cached_property
    def _comparison_dtype(self) -> np.dtype[Any]:
        """The dtype for comparisons with the bounds."""
        return np.promote_types(self.dtype, np.float32) if self.dtype.kind == "f" else np.dtype(np.int64)

    @cached_property
    def _bounds(self) -> tuple[Array, Array] | None:
        """Lower and upper bounds; None if all are infinite or missing."""
        if self.low is None or self.high is None or (np.isinf(self.low).all() and np.isinf(self.high).all()):
            return None
        return self.low.astype(self._comparison_dtype), self.high.astype(self._comparison_dtype)

    @cached_property
    def _tolerant_bounds(self) -> dict[bool, tuple[Array, Array]]:
        """Bounds widened by the rounding tolerance; the key is True for 16-bit numbers, and False for other numbers."""
        low, high = self._bounds or (np.zeros(0), np.zeros(0))
        size = np.maximum(*(np.where(np.isfinite(bound), np.abs(bound), 0) for bound in (low, high)))
        with np.errstate(over="ignore"):  # a bound near the largest number becomes infinite
            return {half: (low - size * tolerance, high + size * tolerance) for half, tolerance in _TOLERANCES}

    @cached_property
    def _kernel_bounds(self) -> Array | None:
        """Bounds and widened bounds for float32 in the layout of the kernel, ``[4, F]``; None without bounds."""
        if self.dtype.kind != "f" or self._bounds is None:
            return None
        return np.stack([*self._bounds, *self._tolerant_bounds[False]]).reshape(4, -1)

    @cached_property
    def _fast_dtype(self) -> np.dtype[Any] | None:
        """The dtype of arrays that need no conversion; None if every array needs one."""
        return self.dtype if self.is_network_format and self.dtype.kind != "b" else None

    @cached_property
    def _largest(self) -> float:
        return float(np.finfo(self.dtype).max)

    # -- conversion --------------------------------------------------------------------------------------------------

    @overload
    def to_environment(self, action: Array, clip: bool | None = None) -> Array: ...
    @overload
    def to_environment(self, action: Tensor, clip: bool | None = None) -> Tensor: ...
    def to_environment(self, action: Any, clip: bool | None = None) -> Any:
        """Convert actions ``[*B, *spec_shape]`` of a network to the environment's format, always as a copy.

        The result has the environment's shape, dtype and numbering. Floating-point numbers are rounded if the
        environment takes integers. A number that exceeds its bound only by rounding is set to the bound. A number
        farther outside is also set to the bound if ``clip`` is true, else it stays outside.

        Args:
            action: An array or a tensor; for a scalar Box ``[N, 1]`` or ``[N]``.
            clip: Whether to clip actions to their Box; None uses the attribute ``clip``.
        """
        if clip is None:
            clip = self.clip
        if action.dtype is self._fast_dtype and not clip:  # avoids most function calls at each environment step
            action = action.copy()
            bounds = self._kernel_bounds
            if bounds is not None:
                jitted(set_to_bounds)(action.reshape(-1, bounds.shape[1]), bounds)
            return action
        if self.shape != self.spec_shape:
            action = action.reshape(-1)
        dtype_kind = self.dtype.kind
        if dtype_kind == "b":
            return action != 0
        action = self._within_bounds(action, clip) if dtype_kind == "f" else self._to_integers(action, clip)
        if isinstance(action, np.ndarray):
            return action.astype(self.dtype)
        return action.to(self._torch_dtype, copy=True)

    def _within_bounds(self, action: Any, clip: bool) -> Any:
        xp: Any = np if isinstance(action, np.ndarray) else torch
        half = action.dtype in _HALF
        if action.dtype.itemsize < self._comparison_dtype.itemsize or not _is_floating(action):
            action = (
                action.astype(self._comparison_dtype)
                if xp is np
                else action.to(numpy_to_torch_dtype_dict[self._comparison_dtype])
            )
        if self._bounds is not None:
            low, high = self._like_action(action, self._bounds)
            if clip:
                action = xp.minimum(xp.maximum(action, low), high)
            else:
                action = _within(xp, action, low, high, *self._like_action(action, self._tolerant_bounds[half]))
        if self.dtype.itemsize < action.dtype.itemsize:  # a larger number would become infinite
            action = action.clip(-self._largest, self._largest)
        return action

    def _to_integers(self, action: Any, clip: bool) -> Any:
        is_array = isinstance(action, np.ndarray)
        if _is_floating(action):
            action = action.round().clip(-_LARGE, _LARGE)
        action = action.astype(np.int64) if is_array else action.to(torch.int64)
        if self.start:
            action = action + self._like_action(action, [np.asarray(self.start)])[0]
        if clip and self._bounds is not None:
            action = action.clip(*self._like_action(action, self._bounds))
        if self.dtype.itemsize < 8:  # a larger number would wrap around
            limits = np.iinfo(self.dtype)
            action = action.clip(limits.min, limits.max)
        return action

    @staticmethod
    def _like_action(action: Any, arrays: Sequence[Array]) -> Sequence[Any]:
        """Return arrays unchanged if the action is an array, else convert them to tensors on the action's device."""
        if isinstance(action, np.ndarray):
            return arrays
        return [torch.as_tensor(array, device=action.device) for array in arrays]

    def single(self, actions: Array) -> Array | np.generic:
        """Return the only action of a batch ``[1, *shape]`` in the type that Gymnasium's spaces sample.

        A scalar Box needs an array. Discrete needs a number, because environments may use it as a dictionary key.
        """
        action: Array | np.generic = actions[0, ...] if self.is_box else actions[0]
        return action

    def from_environment(self, actions: Array) -> Array:
        """Return environment actions ``[T, *shape]`` in the networks' shape and numbering, ``[T, *spec_shape]``."""
        if self.start:
            actions = actions - np.asarray(self.start)
        return actions.reshape(len(actions), *self.spec_shape) if actions.shape[1:] == self.shape else actions

    def outside(self, actions: Tensor) -> Array:
        """Return a mask ``[*B, *shape]`` of numbers that are NaN or, without clipping, outside the Box."""
        received = self.to_environment(actions.cpu().numpy(), clip=False)
        if self.low is None or self.high is None:
            return np.zeros(received.shape, bool)
        return ~((received >= self.low) & (received <= self.high))

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the format as tensors and plain data, which ``torch.load(weights_only=True)`` reads."""
        bounds = {"low": self.low, "high": self.high}
        return {
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "start": list(self.start) if isinstance(self.start, tuple) else self.start,
            "clip": self.clip,
            **{name: None if bound is None else torch.from_numpy(bound.copy()) for name, bound in bounds.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], spec: TensorSpec) -> ActionFormat:
        """Return the format that :meth:`state_dict` wrote, for networks with this action spec.

        Raises:
            ValueError: The format does not fit the spec.
        """
        shape, dtype, start = tuple(map(int, state["shape"])), np.dtype(state["dtype"]), state["start"]
        start = tuple(map(int, start)) if isinstance(start, list) else int(start)
        low, high = bounds = [None if state[name] is None else state[name].numpy() for name in ("low", "high")]
        fits_spec = shape == tuple(spec.shape) or (not shape and spec.shape == (1,))
        fits_bounds = all(bound is None or (bound.shape, bound.dtype) == (shape, dtype) for bound in bounds)
        fits_bounds = fits_bounds and dtype in numpy_to_torch_dtype_dict and (low is None) == (high is None)
        if not fits_spec or not fits_bounds:
            raise ValueError(f"actions must fit {spec}, got shape {shape} and dtype {dtype}")
        clip = bool(state.get("clip", False))  # missing in files of earlier releases
        return cls(shape, dtype, start, low, high, tuple(spec.shape), clip)


def _is_floating(action: Any) -> bool:
    return action.dtype.kind == "f" if isinstance(action, np.ndarray) else action.is_floating_point()


def _within(xp: Any, action: Any, low: Any, high: Any, tolerant_low: Any, tolerant_high: Any) -> Any:
    """Clip actions to their bounds, except actions below ``tolerant_low`` or above ``tolerant_high``."""
    clipped = xp.minimum(xp.maximum(action, low), high)
    return xp.where((action >= tolerant_low) & (action <= tolerant_high), clipped, action)


_TOLERANCES = ((False, ROUNDING), (True, HALF_ROUNDING))


def check_clipping(form: ActionFormat, actions: object) -> None:
    """Raise ValueError if a format clips actions that are not from a Box.

    Args:
        form: The format of the actions.
        actions: The space or spec of the actions, for the error message.
    """
    if form.clip and not form.is_box:
        raise ValueError(f"clip_actions must be False for actions without a Box, got True for {actions}. Leave it out.")


def first_action(space: spaces.Space[Any]) -> int | tuple[int, ...]:
    """Return the first action of a space, which networks and buffers count as 0."""
    start = np.asarray(getattr(space, "start", 0))
    if not start.any():
        return 0
    return tuple(start.tolist()) if start.ndim else int(start)


def to_zero_based(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space with choices that count from 0."""
    if not first_action(space):
        return space
    space = copy.copy(space)
    space.start = space.start * 0  # type: ignore[attr-defined]
    return space


def network_spec(spec: TensorSpec) -> TensorSpec:
    """Return the spec of the networks' actions for an environment's action spec: float32, or int64 choices."""
    if spec.dtype.is_floating_point:
        return spec.to(torch.float32)
    return spec.to(torch.int64) if isinstance(spec, Categorical) else spec


def half_bounded_sampler(spec: TensorSpec, batch: Sequence[int]) -> Callable[[], Tensor] | None:
    """Return a function that draws actions ``[*batch, *A]`` for a spec with infinite bounds; None for other specs.

    TorchRL's own specs draw NaN or infinity for infinite bounds. This function uses the distribution of Gymnasium's
    Box.

    Examples:
        >>> spec = Bounded(torch.tensor([0.0, -torch.inf]), torch.tensor([torch.inf, 1.0]), (2,))
        >>> draw = half_bounded_sampler(spec, [100])
        >>> bool(spec.is_in(draw()).all())
        True
    """
    if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
        return None
    space = spec.expand(*batch, *spec.shape).space
    low, high = space.low, space.high
    below, above = low.isfinite(), high.isfinite()
    bounded = below & above
    if bool(bounded.all()):
        return None
    start, width = low.where(bounded, 0), (high - low).where(bounded, 0)

    def draw() -> Tensor:
        uniform, excess = start + width * torch.rand_like(low), torch.empty_like(low).exponential_()
        one_sided = torch.where(below, low + excess, torch.where(above, high - excess, torch.randn_like(low)))
        return torch.where(bounded, uniform, one_sided)

    return draw
