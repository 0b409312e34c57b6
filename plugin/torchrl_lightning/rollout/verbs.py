"""PyTorchRL's documented verbs, over any buffer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.ranges import Check, integer
from torchrl_lightning.rollout.names import DOCUMENTED, from_documented, to_documented


class DocumentedVerbs:
    """PyTorchRL's documented verbs, over any buffer that is built as ``(size, device, actor, algorithm, envs)``.

    The verbs take and return our keys or the documented names. What they do to its own storage, a buffer says by the
    methods that are not implemented here.
    """

    storage_tensors: ClassVar[tuple[str, ...]] = tuple(DOCUMENTED)
    """The documented names of what may be stored."""
    algorithm: Any = None
    frame_stack: int = 1
    num_channels_obs: int | None = None

    # What the verbs do to its storage, a buffer says: reserve memory for steps [N] like this one, append one, store a
    # rollout, change the capacity, discard everything, copy everything, and iterate over mini-batches.
    _reserve: Callable[[TensorDictBase], None]
    _write_step: Callable[[TensorDictBase], None]
    _write_slice: Callable[[TensorDictBase, int | None, bool], None]
    _resize: Callable[[int], None]
    empty: Callable[..., None]
    _all_data: Callable[[], TensorDictBase]
    _batches: Callable[[int | None, int | None, int, bool, bool], Iterator[TensorDictBase]]

    @classmethod
    def create_factory(cls, size: int, *settings: Any, **options: Any) -> Callable[..., Self]:
        """Return ``f(device, actor, algorithm, envs)`` that builds a buffer of this class.

        Args:
            size: capacity along time.
            *settings: what the constructor takes by place besides these, in its order.
            **options: constructor options.

        Raises:
            TypeError: the constructor has fewer places.
        """
        build: Any = cls
        own = ("size", "device", "actor", "algorithm", "envs")
        parameters = inspect.signature(build).parameters.values()
        places = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY and each.name not in own]
        if len(settings) > len(places):
            raise TypeError(f"{cls.__name__}.create_factory() takes size and {places} by place; name what comes after.")
        options = {**dict(zip(places, settings, strict=False)), **options}

        def create(device: Any = "cpu", actor: Any = None, algorithm: Any = None, envs: Any = None) -> Any:
            return build(size=size, device=device, actor=actor, algorithm=algorithm, envs=envs, **options)

        return create

    @property
    def _parameters(self) -> Mapping[str, Check]:
        """What :meth:`update_storage_parameter` may change, and the check of the new value."""
        return {}

    @property
    def _documented_keys(self) -> Mapping[str, NestedKey]:
        """The keys of the documented names."""
        return DOCUMENTED

    def _read(self, sample: TensorDictBase | Mapping[str, Any], batch_dims: int) -> TensorDictBase:
        return (
            sample if isinstance(sample, TensorDictBase) else from_documented(sample, batch_dims, self._documented_keys)
        )

    def init_tensors(self, sample: TensorDictBase | Mapping[str, Any]) -> None:
        """Reserve memory for steps like ``sample`` (``[N]``, our keys or documented names); nothing is stored.

        Raises:
            ValueError: other steps are stored already.
        """
        self._reserve(self._read(sample, 1))

    def insert_transition(self, sample: TensorDictBase | Mapping[str, Any]) -> None:
        """Append one step of all environments.

        Observation, recurrent state and ``is_init`` may be omitted if they follow from the previous step or rollout:
        they are carried over from the step after the last one. A new episode's first observation does not follow from
        the episode before it.

        Args:
            sample: TensorDict ``[N]`` with our keys, or a dict with the documented names. Results of an earlier
                estimate in it are left out, unless ``extend`` has stored such results.

        Raises:
            KeyError: an entry is missing and cannot be carried over.
        """
        self._write_step(self._read(sample, 1))

    def insert_data_slice(
        self, new_data: TensorDictBase | Mapping[str, Any], time_dim: int | None = None, *, copy: bool = True
    ) -> None:
        """Replace the stored data by a rollout.

        Args:
            new_data: ``[N, T]`` with a dimension named ``"time"``, or any order with ``time_dim``; or a dict with the
                documented names, time-major ``[T, N, ...]``. Results of an earlier estimate in it are left out, unless
                ``extend`` has stored such results.
            time_dim: which dimension is time.
            copy: if False, the buffer may keep the memory itself, where it is time-major and fills the buffer; then
                nobody else may write to it.
        """
        self._write_slice(self._read(new_data, 2), time_dim if isinstance(new_data, TensorDictBase) else 0, copy)

    def reset(self) -> None:
        """Set all counters to zero and discard the stored data (documented verb for ``empty``)."""
        self.empty()

    def get_all_buffer_data(self, data_to_cpu: bool = False, documented_names: bool = False) -> Any:
        """Return a copy of the filled part, ``[T, N]`` named ``("time", None)``, results included.

        The result can be passed to :meth:`insert_data_slice`, also of another buffer: values that came with the data
        stay data, and values that this buffer computed are recomputed. To tell them apart, successors' values are
        included only with computed values.

        Args:
            data_to_cpu: move the copy to the CPU.
            documented_names: return a dict with the documented names instead, time-major.
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
        """Iterate over mini-batches; each sample comes exactly once per epoch unless the numbers limit it.

        Steps are flat, ``[B]``; a recurrent buffer yields whole environments ``[B, T]`` named ``(None, "time")``, and
        sizes count environments. ``batch_keys`` selects the entries; the default is all but the ``collector`` subtree,
        the flags at the root, and the values of successors.

        Args:
            num_mini_batch: mini-batches per epoch; alone, their sizes are as even as possible. The algorithm's, if
                neither number is given.
            mini_batch_size: samples in each; alone, the last one may be short. With both, exactly that many batches
                of that size.
            num_epochs: passes over the data.
            shuffle: a new order for each epoch.
            drop_last: drop the remainder, so that all mini-batches have the same size.
            documented_names: yield dicts with the documented names instead of TensorDicts.

        Raises:
            RuntimeError: nothing is stored.
            ValueError: there are fewer samples than requested, or environments do not divide evenly.
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
        """Prepare what is stored for an update."""

    def after_gradients(self, batch: Any, info: Any) -> Any:
        """Take note that a mini-batch was learned from, and change no data.

        Args:
            batch: the mini-batch.
            info: returned unchanged.
        """
        return info

    def get_num_channels_obs(self, sample: TensorDictBase | Mapping[str, Any]) -> int:
        """Return the channels of one frame, and set ``num_channels_obs``.

        Raises:
            ValueError: observations are a dict, have no channels, or these are no multiple of the frame stack.
        """
        obs = sample.get("Observation", sample.get("observation", None))
        if not isinstance(obs, Tensor):
            raise ValueError(
                f"Channels need one tensor observation [N, C, ...], got {sorted(map(str, sample.keys()))}; "
                "read a dict observation's entries one by one."
            )
        if obs.ndim < 2 or obs.shape[1] % self.frame_stack:
            raise ValueError(
                f"Observations of shape {list(obs.shape)} do not hold frame_stack={self.frame_stack} frames "
                "along their first dimension behind the environments."
            )
        self.num_channels_obs = obs.shape[1] // self.frame_stack
        return self.num_channels_obs

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set a parameter; ``size`` reallocates and keeps the stored data.

        Raises:
            ValueError: there is no such parameter, its value is out of range, or what is stored does not fit into the
                new size.
            TypeError: the value is of another type.
        """
        parameters = self._parameters
        if parameter_name not in parameters:
            raise ValueError(f"No parameter {parameter_name!r}; there are {sorted(parameters)}.")
        new_parameter_value = parameters[parameter_name](new_parameter_value, parameter_name)
        if parameter_name == "size":
            self._resize(new_parameter_value)
            return
        setattr(self, parameter_name, new_parameter_value)
