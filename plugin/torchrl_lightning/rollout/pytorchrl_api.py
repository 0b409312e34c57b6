"""PyTorchRL's documented buffer methods, for any buffer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.validators import Check, integer
from torchrl_lightning.rollout.pytorchrl_names import DOCUMENTED, from_documented, to_documented


class PyTorchRLInterface:
    """Mixin with PyTorchRL's documented methods for buffers built with ``size, device, actor, algorithm, envs``.

    The methods accept and return TensorDicts with this package's keys, or dicts with the documented names. A buffer
    class implements the storage methods that are declared below.
    """

    storage_tensors: ClassVar[tuple[str, ...]] = tuple(DOCUMENTED)
    """The documented names of the entries."""
    algorithm: Any = None
    frame_stack: int = 1
    num_channels_obs: int | None = None

    # The buffer implements these methods. They reserve memory for steps [N], append one step, store a rollout, change
    # the capacity, discard all data, copy all data, and iterate over mini-batches.
    _reserve: Callable[[TensorDictBase], None]
    _write_step: Callable[[TensorDictBase], None]
    _write_slice: Callable[[TensorDictBase, int | None, bool], None]
    _resize: Callable[[int], None]
    empty: Callable[..., None]
    _all_data: Callable[[], TensorDictBase]
    _batches: Callable[[int | None, int | None, int, bool, bool], Iterator[TensorDictBase]]

    @classmethod
    def create_factory(cls, size: int, *settings: Any, **options: Any) -> Callable[..., Self]:
        """Return a function ``f(device, actor, algorithm, envs)`` that builds a buffer of this class.

        Args:
            size: capacity along time.
            *settings: the other positional arguments of the constructor, in the same order.
            **options: keyword arguments of the constructor.

        Raises:
            TypeError: there are more ``settings`` than positional arguments of the constructor.
        """
        build: Any = cls
        factory_arguments = ("size", "device", "actor", "algorithm", "envs")
        parameters = inspect.signature(build).parameters.values()
        positional = [
            parameter.name
            for parameter in parameters
            if parameter.kind is not parameter.KEYWORD_ONLY and parameter.name not in factory_arguments
        ]
        if len(settings) > len(positional):
            raise TypeError(
                f"{cls.__name__}.create_factory() takes size and {positional} as positional arguments, got "
                f"{len(settings)} after size. Pass the others by name."
            )
        options = {**dict(zip(positional, settings, strict=False)), **options}

        def create(device: Any = "cpu", actor: Any = None, algorithm: Any = None, envs: Any = None) -> Any:
            return build(size=size, device=device, actor=actor, algorithm=algorithm, envs=envs, **options)

        return create

    @property
    def _parameters(self) -> Mapping[str, Check]:
        """Validator of each setting that :meth:`update_storage_parameter` can change."""
        return {}

    @property
    def _documented_keys(self) -> Mapping[str, NestedKey]:
        """The key of each documented name."""
        return DOCUMENTED

    def _read(self, sample: TensorDictBase | Mapping[str, Any], batch_dims: int) -> TensorDictBase:
        return (
            sample if isinstance(sample, TensorDictBase) else from_documented(sample, batch_dims, self._documented_keys)
        )

    def init_tensors(self, sample: TensorDictBase | Mapping[str, Any]) -> None:
        """Reserve memory for steps like ``sample``, but do not store the sample.

        Args:
            sample: TensorDict ``[N]``, or a dict with the documented names.

        Raises:
            ValueError: steps are already stored.
        """
        self._reserve(self._read(sample, 1))

    def insert_transition(self, sample: TensorDictBase | Mapping[str, Any]) -> None:
        """Append one step of all environments.

        The buffer fills in a missing observation, recurrent state or ``is_init`` from the previous step or rollout. The
        first step of a new episode must have an observation.

        Args:
            sample: TensorDict ``[N]``, or a dict with the documented names. The buffer drops advantages and other
                estimates in it, unless an earlier ``extend`` stored these entries.

        Raises:
            KeyError: an entry is missing, and the previous step or rollout does not determine it.
        """
        self._write_step(self._read(sample, 1))

    def insert_data_slice(
        self, new_data: TensorDictBase | Mapping[str, Any], time_dim: int | None = None, *, copy: bool = True
    ) -> None:
        """Replace the stored data with a rollout.

        Args:
            new_data: TensorDict ``[N, T]`` or ``[T, N]``, or time-major dict ``[T, N, ...]`` with the documented names.
                A TensorDict needs a dimension named ``"time"``, or ``time_dim``. The buffer drops the advantages and
                other estimates in the data, unless an earlier ``extend`` stored these entries.
            time_dim: index of the time dimension.
            copy: if False, the buffer may use the memory of a time-major rollout of ``size`` steps instead of copying
                it. The caller must not write to this memory afterwards.
        """
        self._write_slice(self._read(new_data, 2), time_dim if isinstance(new_data, TensorDictBase) else 0, copy)

    def reset(self) -> None:
        """Discard the stored data and reset all counters (PyTorchRL's name for ``empty``)."""
        self.empty()

    def get_all_buffer_data(self, data_to_cpu: bool = False, documented_names: bool = False) -> Any:
        """Return a copy of the stored steps and estimates, ``[T, N]`` with dimension names ``("time", None)``.

        :meth:`insert_data_slice` of this or another buffer accepts the result. That buffer keeps values that the policy
        wrote, and computes all other values again. If the policy wrote the values of steps, computed values of
        successor states are left out.

        Args:
            data_to_cpu: move the copy to the CPU.
            documented_names: return a time-major dict with the documented names instead.
        """
        data = self._all_data()
        data = data.cpu() if data_to_cpu else data
        return to_documented(data, self._documented_keys) if documented_names else data

    def generate_batches(
        self,
        num_mini_batch: int | None = None,
        mini_batch_size: int | None = None,
        num_epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        documented_names: bool = False,
    ) -> Iterator[Any]:
        """Iterate over mini-batches; an epoch visits every sample once, unless the arguments limit its size.

        A mini-batch has the steps ``[B]``. A recurrent buffer yields whole environments ``[B, T]`` with dimension names
        ``(None, "time")``, and sizes count environments. ``batch_keys`` selects the entries. By default, a mini-batch
        has all entries except the ``collector`` subtree, the flags at the root, and successor values.

        Args:
            num_mini_batch: mini-batches per epoch. Without ``mini_batch_size``, they have nearly equal sizes. If both
                arguments are ``None``, the algorithm's values apply.
            mini_batch_size: samples per mini-batch. Without ``num_mini_batch``, the last mini-batch may be smaller.
                If both are given, an epoch has exactly ``num_mini_batch`` mini-batches of ``mini_batch_size`` samples.
            num_epochs: number of passes over the data.
            shuffle: draw a new order for each epoch.
            drop_last: drop the remainder, so that all mini-batches have the same size.
            documented_names: yield dicts with the documented names instead of TensorDicts.

        Raises:
            RuntimeError: nothing is stored.
            ValueError: fewer samples are stored than requested, or the environments do not divide evenly.
        """
        if num_mini_batch is None and mini_batch_size is None:
            num_mini_batch, mini_batch_size = (
                getattr(self.algorithm, name, None) for name in ("num_mini_batch", "mini_batch_size")
            )
        integer(num_epochs, "num_epochs")
        batches = self._batches(num_mini_batch, mini_batch_size, num_epochs, shuffle, drop_last)
        return (to_documented(batch, self._documented_keys) for batch in batches) if documented_names else batches

    # ---- around an update -------------------------------------------------------------------------------------------

    def before_gradients(self) -> None:
        """Prepare the stored data for an update."""

    def after_gradients(self, batch: Any, info: Any) -> Any:
        """Record an update and return ``info``; the data stays unchanged.

        Args:
            batch: the mini-batch of the update.
            info: result of the update, returned unchanged.
        """
        return info

    def get_num_channels_obs(self, sample: TensorDictBase | Mapping[str, Any]) -> int:
        """Return the number of channels of one frame, and set ``num_channels_obs``.

        Raises:
            ValueError: the observation is a dict or lacks channels, or the number of channels is not a multiple of
                ``frame_stack``.
        """
        obs = sample.get("Observation", sample.get("observation", None))
        if not isinstance(obs, Tensor):
            raise ValueError(
                "The sample must have one tensor observation [N, C, ...], got the entries "
                f"{sorted(map(str, sample.keys()))}. Read the channels of a dict observation entry by entry."
            )
        if obs.ndim < 2 or obs.shape[1] % self.frame_stack:
            raise ValueError(
                f"Observations must be [N, C, ...] with C a multiple of frame_stack={self.frame_stack}, got the shape "
                f"{list(obs.shape)}."
            )
        self.num_channels_obs = obs.shape[1] // self.frame_stack
        return self.num_channels_obs

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set a parameter; ``size`` reallocates and keeps the stored data.

        Raises:
            ValueError: the parameter is unknown, its value is out of range, or the stored data does not fit into the
                new size.
            TypeError: the value has the wrong type.
        """
        parameters = self._parameters
        if parameter_name not in parameters:
            raise ValueError(f"parameter_name must be one of {sorted(parameters)}, got {parameter_name!r}.")
        new_parameter_value = parameters[parameter_name](new_parameter_value, parameter_name)
        if parameter_name == "size":
            self._resize(new_parameter_value)
            return
        setattr(self, parameter_name, new_parameter_value)
