"""Base class of the Velora buffers: six documented columns in one ring buffer, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import safe_open
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs.transforms import Transform

from torchrl_lightning._core.state import to_plain
from torchrl_lightning._core.torchrl_compat import new_tensordict
from torchrl_lightning._core.tree import check_tensordict, to_tensordict
from torchrl_lightning._core.validators import integer, optional
from torchrl_lightning.replay.conversion import to_tensor
from torchrl_lightning.replay.replay_buffer import ExperienceBuffer
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.velora.buffer_files import CHUNK, DIMS, NAMES, check_files, save_files, tensor_shapes
from torchrl_lightning.velora.experience import (
    COLUMNS,
    HIDDEN,
    PREVIOUS,
    BatchExperience,
    features_of,
    flatten_entry,
    make_transitions,
)

WIDTHS: dict[str, NestedKey] = {"state_dim": "observation", "action_dim": "action", "hidden_dim": HIDDEN}


class BufferBase(ExperienceBuffer):
    """Base class of the Velora buffers; a subclass defines ``sample``.

    The columns are stored under this package's keys. TorchRL's methods, transforms and samplers therefore work together
    with Velora's methods. ``extend`` takes TensorDicts; their entries may have any shape with the declared number of
    elements.

    Args:
        capacity: maximum number of transitions; new transitions replace the oldest.
        state_dim: length of an observation; ``None`` takes it from the first transition.
        action_dim: length of an action; ``None`` takes it from the first transition.
        hidden_dim: length of a recurrent state; ``None`` takes it from the first transition.
        device: device of the transitions; ``None`` means torch's default device.
        scratch_dir: folder for memory-mapped transitions; ``None`` keeps them in memory.
        sampler: this and the following arguments are described in :class:`ExperienceBuffer`.

    Raises:
        TypeError: the class does not define ``sample``.
        ValueError: a size is not a positive integer.

    Examples:
        >>> class Newest(BufferBase):
        ...     def sample(self, batch_size=None):
        ...         return self.experience(self.storage.get(slice(len(self) - batch_size, None)))
        >>> buffer = Newest(9, state_dim=1, action_dim=1, hidden_dim=1)
        >>> for t in range(3):
        ...     buffer.add([t], [0.0], 1.0, [t + 1], False, [0.0])
        >>> buffer.sample(2).states.flatten().tolist()
        [1.0, 2.0]
    """

    CONFIG_NAME: ClassVar[str | None] = None

    def __init__(
        self,
        capacity: int = 100_000,
        state_dim: int | None = None,
        action_dim: int | None = None,
        hidden_dim: int | None = None,
        *,
        device: torch.device | str | None = None,
        scratch_dir: str | Path | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        num_envs: int | None = None,
        generator: torch.Generator | None = None,
        batch_size: int | None = None,
        priority_key: NestedKey = "td_error",
        transform: Transform | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        shared: bool = False,
        time_dim: int | None = None,
    ) -> None:
        if type(self).sample is BufferBase.sample:
            raise TypeError(f"{type(self).__name__} must define sample. Use RecurrentReplayBuffer.")
        integer(capacity, "capacity")
        for name, number in zip(WIDTHS, (state_dim, action_dim, hidden_dim), strict=True):
            optional(integer)(number, name)
        self.capacity, self.state_dim, self.action_dim, self.hidden_dim = capacity, state_dim, action_dim, hidden_dim
        self.device = None if device is None else torch.device(device)
        storage_device = torch.get_default_device() if self.device is None else self.device
        storage = RingStorage(capacity, device=storage_device, scratch_dir=scratch_dir)
        super().__init__(
            storage=storage,
            writer=writer,
            sampler=sampler,
            num_envs=num_envs,
            generator=generator,
            batch_size=batch_size,
            priority_key=priority_key,
            transform=transform,
            pin_memory=pin_memory,
            prefetch=prefetch,
            shared=shared,
            time_dim=time_dim,
        )

    # ------------------------------------------------------------------ writing

    def add(
        self,
        state: Any,
        action: Any = None,
        reward: Any = None,
        next_state: Any = None,
        done: Any = None,
        hidden: Any = None,
        *,
        truncated: Any = False,
        previous_hidden: Any = None,
    ) -> Any:
        """Add one transition: one row of each argument of :meth:`add_multi`.

        As in TorchRL, ``state`` may also be a TensorDict with this package's keys, without other arguments.

        Raises:
            ValueError: an argument is missing or has the wrong size.
        """
        if isinstance(state, TensorDictBase):
            return super().add(state)
        values = (state, action, reward, next_state, done, hidden, truncated, previous_hidden)
        rows = {
            name: None if value is None else to_tensor(value, name).reshape(1, -1)
            for name, value in zip((*NAMES, "truncated", "previous_hiddens"), values, strict=True)
        }
        self.add_multi(**rows)
        return None

    def add_multi(
        self,
        states: Any,
        actions: Any,
        rewards: Any,
        next_states: Any,
        dones: Any,
        hiddens: Any,
        *,
        truncated: Any = None,
        previous_hiddens: Any = None,
    ) -> None:
        """Add transitions, oldest first; the buffer keeps the last ``capacity`` transitions.

        With several environments, pass whole steps of all environments: ``n`` must be a multiple of ``num_envs``.

        Args:
            states: ``[n, state_dim]``.
            actions: ``[n, action_dim]``, or ``[n]``.
            rewards: ``[n]`` or ``[n, 1]``.
            next_states: ``[n, state_dim]``.
            dones: ``[n]`` or ``[n, 1]``, True if the successor is terminal.
            hiddens: ``[n, hidden_dim]``, the recurrent states after acting.
            truncated: ``[n]`` or ``[n, 1]``, True if the episode was truncated; False by default.
            previous_hiddens: ``[n, hidden_dim]``, the recurrent states before acting; pass them in all calls or in
                none.

        Raises:
            ValueError: an argument is missing or has the wrong size; nothing is written.
        """
        values = (states, actions, rewards, next_states, dones, hiddens)
        columns = {name: self._column(value, name) for name, value in zip(NAMES, values, strict=True)}
        rows = len(columns["states"])
        if truncated is None:
            truncated = torch.zeros(rows, 1, dtype=torch.float32)
        columns["truncated"] = self._column(truncated, "truncated")
        if previous_hiddens is not None:
            columns["previous_hiddens"] = self._column(previous_hiddens, "previous_hiddens")
        if columns["rewards"].shape[1] != 1:
            raise ValueError(f"rewards must have one number per transition, got {columns['rewards'].shape[1]}.")
        if uneven := {name: len(column) for name, column in columns.items() if len(column) != rows}:
            raise ValueError(f"Every argument must have one row per transition, got {rows} states, but {uneven}.")
        data, envs = make_transitions(columns), self.writer.num_envs
        if envs > 1 and rows % envs == 0:
            self.extend(data.view(-1, envs), time_dim=0)
        else:
            self.extend(data)

    def _column(self, value: Any, name: str) -> Tensor:
        if value is None:
            raise ValueError(f"{name} must not be None.")
        column = to_tensor(value, name).to(self.storage.device, torch.float32)
        return column.unsqueeze(-1) if column.ndim == 1 else column.flatten(1) if column.ndim else column.reshape(1, 1)

    def extend(self, data: TensorDictBase, *args: Any, **kwargs: Any) -> Tensor:
        """Write a TensorDict with this package's keys; see :meth:`ExperienceBuffer.extend`.

        Raises:
            TypeError: ``data`` is not a TensorDict.
            ValueError: the size of an observation, action or recurrent state differs from the declared size.
        """
        if self.storage.tree and None not in (self.state_dim, self.action_dim, self.hidden_dim):
            index: Tensor = super().extend(data, *args, **kwargs)  # raises an error for another schema
            return index
        check_tensordict(data)
        dims = {name: features_of(data, key) for name, key in WIDTHS.items()}
        expected = {name: dims[name] if width is None else width for name, width in self._dims.items()}
        problems = [
            f"{key!r} has {width} numbers, expected {name}={expected[name]}"
            for name, key in (*WIDTHS.items(), ("state_dim", COLUMNS["next_states"]))
            if (width := features_of(data, key)) is not None and width != expected[name]
        ]
        if problems:
            raise ValueError(f"The data does not fit the buffer: {'; '.join(problems)}; nothing was written.")
        index = super().extend(data, *args, **kwargs)
        self.state_dim, self.action_dim, self.hidden_dim = (expected[name] for name in WIDTHS)
        return index

    # ------------------------------------------------------------------ reading

    def sample(self, batch_size: int | None = None) -> Any:  # type: ignore[override]
        """Sample a batch; defined by subclasses."""
        raise NotImplementedError(f"{type(self).__name__} must define sample.")

    def draw(self, batch_size: int | None = None) -> TensorDictBase:
        """Sample a TensorDict with this package's keys and TorchRL's entry ``index`` for priority updates."""
        batch: TensorDictBase = super().sample(batch_size)
        return batch

    def experience(self, data: TensorDictBase) -> BatchExperience:
        """Convert transitions ``[B]`` to Velora's names in float32, with flat recurrent states.

        Raises:
            KeyError: the transitions lack one of the documented columns.
        """
        columns = {name: flatten_entry(data, key) for name, key in COLUMNS.items()}
        if PREVIOUS in data.keys():  # noqa: SIM118  # a TensorDict iterates over rows
            columns["previous_hiddens"] = flatten_entry(data, PREVIOUS)
        batch: BatchExperience = BatchExperience.from_tensordict(new_tensordict(columns, data.batch_size))
        return batch

    @property
    def size(self) -> int:
        """Number of stored transitions."""
        return len(self)

    @property
    def position(self) -> int:
        """Index of the row for the next transition.

        Raises:
            RuntimeError: the rings of several environments are unevenly filled.
        """
        positions = self.writer.positions.tolist()
        if not self.writer.is_uniformly_filled or len(set(positions)) > 1:
            raise RuntimeError(
                f"position is undefined for unevenly filled rings, got the positions {positions}. Use dumps."
            )
        return int(positions[0]) % self.writer.length * self.writer.num_envs

    @property
    def _dims(self) -> dict[str, int | None]:
        """Length of an observation, an action and a recurrent state; None if unknown."""
        return {"state_dim": self.state_dim, "action_dim": self.action_dim, "hidden_dim": self.hidden_dim}

    # ------------------------------------------------------------------ state and files

    def metadata(self) -> dict[str, Any]:
        """Return Velora's seven entries: ``capacity``, the three sizes, ``position``, ``size``, ``device``."""
        return {
            "capacity": self.capacity,
            **self._dims,
            "position": self.position,
            "size": len(self),
            "device": None if self.device is None else str(self.device),
        }

    def _stored_tensors(self) -> dict[str, Tensor]:
        if not len(self):
            shapes = tensor_shapes(self.metadata())
            return {name: torch.zeros(0, width or 0, dtype=torch.float32) for name, (_, width) in shapes.items()}
        experience = self.experience(self.storage.get(slice(None)))
        return {name: experience.get(name) for name in NAMES}

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the exact state for ``load_state_dict``, and Velora's six tensors (the filled rows).

        The six tensors are left out if rings are unevenly filled or the transitions have no recurrent state.
        """
        state = super().state_dict(copy=copy)
        if self.writer.is_uniformly_filled and (
            not len(self) or "recurrent_state" in self.storage.tree.get("next", {})
        ):
            state |= to_plain(dict(self._stored_tensors()), copy)
        return state

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        super()._validate_consistency(values)
        dims = self._dims
        for name, width in _stored_dims(values).items():
            if dims[name] not in (None, width):
                raise ValueError(f"The state has {name}={width}, this buffer has {name}={dims[name]}.")

    def apply_state(self, values: Mapping[str, Any]) -> None:
        """Load the stored transitions and the sizes of their columns."""
        super().apply_state(values)
        dims = {**self._dims, **_stored_dims(values)}
        self.state_dim, self.action_dim, self.hidden_dim = (dims[name] for name in WIDTHS)

    def save(self, dirpath: str | Path, prefix: str = "buffer_") -> None:
        """Write ``<prefix>metadata.json`` and ``<prefix>state.safetensors`` in Velora's format.

        The files hold the six tensors at full capacity; ``dumps`` saves the whole state. An error leaves older files
        intact.

        Args:
            dirpath: the folder; created if it is missing.
            prefix: prefix of both file names.

        Raises:
            OSError: the disk is full or not writable.
            ValueError: the buffer is empty and a size is unknown.
        """
        metadata = self.metadata()
        unknown = [name for name in DIMS if metadata[name] is None]
        if unknown:
            raise ValueError(f"{unknown} must be known to save the buffer; nothing was saved. Add a transition first.")
        save_files(dirpath, prefix, self._stored_tensors(), metadata)

    @classmethod
    def load(cls, state_path: str | Path, metadata: Mapping[str, Any]) -> Self:
        """Build a buffer from files of this class or Velora.

        Args:
            state_path: the safetensors file; the suffix is optional.
            metadata: the content of the JSON file.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: an entry of the metadata is missing or invalid, the file is truncated or corrupted or has
                another format, file and metadata contradict each other, or the memory does not suffice. Nothing is
                allocated then.
        """
        path, checked = check_files(state_path, metadata)
        size = checked["size"]
        buffer = cls(*(checked[name] for name in DIMS), device=checked["device"] or "cpu")
        # If the ring is full, write the rows before the oldest row twice, because this also restores the position.
        rewritten = checked["position"] if size == checked["capacity"] else 0
        with safe_open(path, framework="pt", device="cpu") as file:
            columns = [file.get_slice(name) for name in NAMES]
            for stop in (size, rewritten):
                for first in range(0, stop, CHUNK):
                    buffer.add_multi(*(column[first : min(first + CHUNK, stop)] for column in columns))
        return buffer


def _stored_dims(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the columns in a state, if it stores rows."""
    count, data = values["storage"]["count"], values["storage"]["data"]
    rows = to_tensordict(data, torch.Size([count])) if data is not None and count else TensorDict()
    return {name: width for name, key in WIDTHS.items() if (width := features_of(rows, key)) is not None}
