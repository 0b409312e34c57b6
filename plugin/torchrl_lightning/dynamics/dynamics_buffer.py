"""PyTorchRL's replay buffer for dynamics models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform

from torchrl_lightning._core.keys import BOOKKEEPING, NEXT, REPEATED
from torchrl_lightning._core.protocols import EnvsApi
from torchrl_lightning._core.state import any_value
from torchrl_lightning._core.tree import check_tensordict, entry_of, keyed_leaves, next_key, path_of
from torchrl_lightning._core.validators import Check, boolean, integer
from torchrl_lightning.dynamics.targets import IS_RESET, DynamicsTargets
from torchrl_lightning.environments import environment_specs
from torchrl_lightning.environments.specs import space_to_spec
from torchrl_lightning.replay import ExperienceBuffer, RingStorage, RingWriter
from torchrl_lightning.replay.row_order import time_axis
from torchrl_lightning.rollout.pytorchrl_api import PyTorchRLInterface
from torchrl_lightning.rollout.pytorchrl_names import to_documented


class MBReplayBuffer(ExperienceBuffer, PyTorchRLInterface):
    """Replay buffer of PyTorchRL's model-based algorithms, which turns transitions into inputs and targets.

    One row holds one step of all environments; a batch flattens time and environments into one dimension.
    ``generate_batches`` applies :class:`DynamicsTargets` to all rows, and standardises with the statistics of these
    rows. TorchRL's methods also work: ``sample`` draws plain transitions.

    Args:
        size: capacity along time.
        device: device of the stored rows and the batches.
        actor: any object; its ``dynamics_model.reward_function`` is the analytic reward, and its ``action_space``
            describes the actions. Both attributes are optional.
        algorithm: any object; stored as an attribute.
        envs: environments with ``num_envs``; Gymnasium's or TorchRL's vector environments also define the action spec.
        reward_function: an analytic reward (see :class:`DynamicsTargets`); None uses the reward function of the actor's
            model. Without a reward function, the reward is a target.
        action_spec: spec of an action, required for discrete actions; None uses the spec of ``envs`` or ``actor``.
        autoreset: True if the next observation of an episode's last step is the first observation of the next episode,
            as in PyTorchRL's environments. The buffer stores these steps, marks them with ``("next", "is_init")``, and
            excludes them from batches. Data of our collectors do not need this setting.
        num_envs: number of environments; None uses the number of ``envs`` or of the first write.
        generator: random generator; None seeds one from torch's global generator.
        batch_size: rows per ``sample()``.
        transform: a TorchRL transform, as in :class:`ExperienceBuffer`.
        time_dim: the time dimension of written rollouts without names, as in :class:`ExperienceBuffer`.

    Raises:
        ValueError: a number is not a positive integer.

    Source:
        https://github.com/PyTorchRL/pytorchrl

    Examples:
        >>> buffer = MBReplayBuffer(4)
        >>> step = {"Observation": torch.ones(2, 3), "Action": torch.zeros(2, 1), "NextObservation": torch.ones(2, 3)}
        >>> for _ in range(5):
        ...     buffer.insert_transition({**step, "Reward": torch.ones(2, 1), "Done": torch.zeros(2, 1)})
        >>> buffer.size, buffer.max_size, buffer.num_envs
        (4, 4, 2)
        >>> [tuple(batch["inputs"].shape) for batch in buffer.generate_batches(mini_batch_size=3)]
        [(3, 4), (3, 4), (2, 4)]
    """

    CONFIG_NAME: ClassVar[str | None] = "model_based"
    RUNTIME_ARGUMENTS: ClassVar[tuple[str, ...]] = ("actor", "algorithm", "batch_size", "envs", "generator", "num_envs")

    storage: RingStorage
    writer: RingWriter
    storage_tensors: ClassVar[tuple[str, ...]] = (
        "Observation",
        "RecurrentHiddenStates",
        "Done",
        "Action",
        "Reward",
        "NextObservation",
        "NextRecurrentHiddenStates",
        "NextDone",
    )
    _parameters: ClassVar[Mapping[str, Check]] = {
        "max_size": integer,
        **dict.fromkeys(("actor", "algorithm", "envs", "reward_function", "action_spec"), any_value),
        "autoreset": boolean,
    }

    def __init__(
        self,
        size: int = 100_000,
        device: torch.device | str = "cpu",
        actor: Any = None,
        algorithm: Any = None,
        envs: Any = None,
        *,
        reward_function: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        action_spec: TensorSpec | None = None,
        autoreset: bool = False,
        num_envs: int | None = None,
        generator: torch.Generator | None = None,
        batch_size: int | None = None,
        transform: Transform | None = None,
        time_dim: int | None = None,
    ) -> None:
        size = integer(size, "size")
        num_envs = EnvsApi.of(envs).num_envs if num_envs is None else num_envs
        self._num_envs = None if num_envs is None else integer(num_envs, "num_envs")
        self.autoreset = boolean(autoreset, "autoreset")
        self.actor, self.algorithm, self.envs = actor, algorithm, envs
        self.reward_function, self.action_spec = reward_function, action_spec
        self._max_size = size
        super().__init__(
            storage=RingStorage(size * (self._num_envs or 1), device=device),
            writer=RingWriter(self._num_envs or 1),
            generator=generator,
            batch_size=batch_size,
            transform=transform,
            time_dim=time_dim,
        )

    @property
    def max_size(self) -> int:
        """Capacity along time; a change keeps the newest rows."""
        return self._max_size

    @max_size.setter
    def max_size(self, size: int) -> None:
        self._replace_rings(integer(size, "max_size"), self._num_envs)

    @property
    def size(self) -> int:
        """Number of stored rows along time, in the fullest environment."""
        return int(self.writer.filled.max())

    @property
    def step(self) -> int:
        """Row index of the next write."""
        return int(self.writer.positions.max()) % self.max_size

    @property
    def num_envs(self) -> int | None:
        """Number of environments; None before the first write."""
        return self._num_envs

    @property
    def device(self) -> torch.device:
        """Device of the stored rows."""
        return torch.device(self.storage.device)

    # ---- writing ----------------------------------------------------------------------------------------------------

    def extend(
        self,
        data: TensorDictBase,
        env_ids: Tensor | None = None,
        *,
        time_dim: int | None = None,
        update_priority: bool | None = None,
    ) -> Tensor:
        """Write steps; see :meth:`ExperienceBuffer.extend`. If the first write is ``[n]``, ``num_envs`` becomes 1.

        Raises:
            KeyError: the next observation is missing, or ``autoreset`` is set and ``("next", "done")`` is missing.
        """
        check_tensordict(data)
        data = self._mark_resets(data)
        num_envs = _num_envs_in(data, time_dim, self.time_dim) if env_ids is None else None
        with self._rings_for(None if 0 in data.shape else num_envs):
            return super().extend(data, env_ids, time_dim=time_dim, update_priority=update_priority)

    def check_shareable(self) -> None:
        """Validate that the buffer can be shared; raise ValueError if the number of environments is unknown."""
        if self._num_envs is None:
            raise ValueError(
                "num_envs must be known before the buffer is shared, got None. Build it with num_envs=, or write the "
                "first rows and call share() then."
            )
        super().check_shareable()

    def _mark_resets(self, data: TensorDictBase) -> TensorDictBase:
        """Mark the steps before a reset; raise KeyError for data without next observations."""
        if self.storage.cells is None and not _observations(data):
            raise KeyError(
                "A transition must have an observation at the root and under 'next', got "
                f"{sorted(map(str, data.keys(True, True)))}. Write NextObservation; for the last step of an episode, "
                "it is the final observation."
            )
        if not self.autoreset:
            return data
        done = entry_of(data, ("next", "done"))
        if done is None:
            raise KeyError("autoreset=True needs the entry ('next', 'done') to find the ends of episodes.")
        return data.copy().set(IS_RESET, done.clone())

    def _write_step(self, step: TensorDictBase) -> None:
        with self._rings_for(len(step)):
            self.extend(step)

    def _write_slice(self, data: TensorDictBase, time_dim: int | None, copy: bool) -> None:
        self.extend(data, time_dim=time_dim)

    def insert_data_slice(
        self, new_data: TensorDictBase | Mapping[str, Any], time_dim: int | None = None, *, copy: bool = True
    ) -> None:
        """Append transitions; if the data exceed the capacity, keep the newest transitions.

        Args:
            new_data: TensorDict ``[N, T]``, ``[T, N]``, or ``[T]`` of one environment, or time-major dict
                ``[T, N, ...]`` with the documented names. A TensorDict needs a dimension named ``"time"``, or
                ``time_dim``.
            time_dim: index of the time dimension.
            copy: ignored; rows are always copied.
        """
        super().insert_data_slice(new_data, time_dim, copy=copy)

    def insert_single_tensor_slice(
        self, tensor_storage: MutableMapping[str, Tensor], tensor_key: str, tensor_values: Tensor
    ) -> int:
        """Write values of one entry into the rows of the next ``insert_data_slice``; do not advance the cursor.

        Args:
            tensor_storage: entries ``[max_size, ...]``; a missing entry is added and filled with zeros.
            tensor_key: name of the entry.
            tensor_values: ``[T, ...]``; if ``T`` exceeds the capacity, the newest values are kept.

        Returns:
            Number of given values, ``T``.

        Raises:
            ValueError: shape or dtype of a row differ from the stored entry.

        Examples:
            >>> columns = {}
            >>> MBReplayBuffer(3).insert_single_tensor_slice(columns, "Reward", torch.arange(5))
            5
            >>> columns["Reward"].tolist()
            [3, 4, 2]
        """
        values = torch.as_tensor(tensor_values)
        stored = tensor_storage.get(tensor_key)
        expected = torch.Size([self.max_size, *values.shape[1:]])
        column = values.new_zeros(expected) if stored is None else stored
        if column.shape != expected or column.dtype != values.dtype:
            raise ValueError(
                f"The entry {tensor_key!r} must be {column.dtype} {list(column.shape)} to store {self.max_size} such "
                f"rows, got rows of {values.dtype} {list(values.shape[1:])}."
            )
        length = len(values)
        num_kept = min(length, self.max_size)
        rows = (self.step + torch.arange(length - num_kept, length)) % self.max_size
        column[rows.to(column.device)] = values[length - num_kept :].to(column.device)
        tensor_storage[tensor_key] = column
        return length

    def _reserve(self, step: TensorDictBase) -> None:
        if self.size:
            raise ValueError(f"init_tensors needs an empty buffer, got {self.size} steps. Call reset().")
        with self._rings_for(len(step)):
            self.storage.allocate(self._mark_resets(step))

    @contextmanager
    def _rings_for(self, num_envs: int | None) -> Iterator[None]:
        """Build rings for ``num_envs`` environments if their number is unknown; remove the rings if the block fails."""
        is_first = self._num_envs is None and num_envs is not None
        if is_first:
            self._replace_rings(self.max_size, num_envs)
        try:
            yield
        except BaseException:
            if is_first:
                self._replace_rings(self.max_size, None)
            raise

    def _replace_rings(self, size: int, num_envs: int | None) -> None:
        """Replace the rings by rings of ``size`` steps for ``num_envs`` environments, and move the newest rows."""
        storage = RingStorage(size * (num_envs or 1), device=self.storage.device)
        old_writer = self.writer
        writer = RingWriter(num_envs or 1, done_reduce=old_writer.done_reduce, check_successors=False)
        writer.register_storage(storage)
        if num_envs == self.writer.num_envs:
            writer.rings.continue_from(self.writer.rings)
        if self.storage.data is not None and num_envs is not None:
            storage.allocate(self.storage.data[:1])
        for env in range(self.writer.num_envs if self.size else 0):
            ring = torch.tensor([env])
            for cells in self._episodes_of(env):
                writer.cut(ring)
                writer.extend(self.storage.get(cells), ring)
            if old_writer.index is not None and not old_writer.index.is_running(ring.numpy()).all():
                writer.cut(ring)
        writer.check_successors = old_writer.check_successors
        writer.write_count = old_writer.write_count  # moved rows do not count as writes
        with self.locked():
            self.set_storage(storage)
            self.set_writer(writer)
            self.set_rng(self.generator)
            self.clear_sampler()
        self._max_size, self._num_envs = size, num_envs

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _cells_of(self, env: int) -> Tensor:
        """Return the filled cells of an environment, oldest first."""
        steps = torch.arange(int(self.writer.oldest[env]), int(self.writer.positions[env]))
        return self.writer.cell(torch.tensor(env), steps)

    def _episodes_of(self, env: int) -> list[Tensor]:
        """Return the filled cells of an environment as one tensor per episode, oldest first.

        Without an episode index, return a single tensor with all filled cells.
        """
        cells, index = self._cells_of(env), self.writer.index
        if index is None or not len(cells):
            return [cells] if len(cells) else []
        position = self.writer.rings.position_of(cells)
        begin = index.begin(torch.full_like(position, env), position)
        return list(cells.split(begin.unique_consecutive(return_counts=True)[1].tolist()))

    def get_data_slice(self, start_pos: int, end_pos: int, documented_names: bool = False) -> Any:
        """Return a copy of the rows ``[start_pos, end_pos)``, ``[T, N]`` with dimension names ``("time", None)``.

        Args:
            start_pos: first row; 0 is the oldest stored row.
            end_pos: end of the range (exclusive), at most ``size``.
            documented_names: return a dict with the documented names instead.

        Raises:
            IndexError: a row is not stored.
            RuntimeError: environments hold different numbers of rows.
        """
        if not 0 <= start_pos <= end_pos <= self.size or start_pos == self.size:
            raise IndexError(f"Rows [{start_pos}, {end_pos}) must be among the stored rows [0, {self.size}).")
        if not self.writer.is_uniformly_filled:
            raise RuntimeError(
                f"Environments must hold equal numbers of rows, got {self.writer.filled.tolist()}. Use buffer.sample."
            )
        writer = self.writer
        steps = int(writer.oldest[0]) + torch.arange(start_pos, end_pos)
        data = self.storage.get(writer.cell(torch.arange(writer.num_envs), steps[:, None]).flatten())
        data = data.reshape(len(steps), writer.num_envs)
        data.names = ["time", None]
        return to_documented(data, self._documented_keys) if documented_names else data

    def _all_data(self) -> TensorDictBase:
        if not self.size:
            raise RuntimeError("Nothing is stored: insert transitions first.")
        data: TensorDictBase = self.get_data_slice(0, self.size)
        return data

    @property
    def targets(self) -> DynamicsTargets:
        """Build a new transform that computes inputs and targets of the stored rows.

        Raises:
            RuntimeError: the buffer is empty.
            ValueError: actions are integers, and their spec is unknown.
        """
        data = self.storage.data
        if data is None:
            raise RuntimeError("Nothing is stored: insert transitions first.")
        observations = _observations(data).items()
        observation_spec = Composite({key: Unbounded(leaf.shape[1:], dtype=leaf.dtype) for key, leaf in observations})
        model = getattr(self.actor, "dynamics_model", None)
        reward = self.reward_function or getattr(model, "reward_function", None)
        return DynamicsTargets(observation_spec, self._action_spec(data.get("action")), reward=reward)

    def _action_spec(self, action: Tensor) -> TensorSpec:
        if self.action_spec is not None:
            return self.action_spec
        if isinstance(self.envs, VectorEnv | EnvBase):
            return environment_specs(self.envs).action
        space = getattr(self.actor, "action_space", None)
        if isinstance(space, spaces.Space):
            return space_to_spec(space, "action")
        if not action.is_floating_point():
            raise ValueError(
                f"The number of actions is unknown, got {action.dtype} actions without a spec. Pass action_spec=, "
                "envs=, or an actor with an action_space."
            )
        return Unbounded(action.shape[1:])

    def generate_batches(  # type: ignore[override]  # the documented order of arguments is the same
        self,
        num_mini_batch: int | None = None,
        mini_batch_size: int = 256,
        num_epochs: int = 1,
        shuffle: bool = True,
        documented_names: bool = False,
    ) -> Iterator[Any]:
        """Iterate over inputs and targets of all usable rows, standardised with the statistics of these rows.

        Args:
            num_mini_batch: ignored, as in PyTorchRL; ``mini_batch_size`` determines the number of batches.
            mini_batch_size: rows per batch; the last batch of an epoch may be smaller, but is never empty.
            num_epochs: passes over the rows.
            shuffle: draw a new order for each epoch; False yields the oldest rows first.
            documented_names: yield dicts with ``train_input``, ``train_label`` and ``batch_number`` instead.

        Returns:
            An iterator over TensorDicts ``[B]`` with ``inputs`` and ``targets``.

        Raises:
            RuntimeError: the buffer is empty.
            ValueError: no stored row is usable, or a number is NaN or infinite; the message names its column.
        """
        size = integer(mini_batch_size, "mini_batch_size")
        integer(num_epochs, "num_epochs")
        targets = self.targets
        cells = torch.cat([self._cells_of(env) for env in range(self.writer.num_envs)])
        cells = cells[self.writer.rings.position_of(cells).argsort(stable=True)]
        if not len(cells):
            raise RuntimeError("Nothing is stored: insert transitions first.")
        data = self.storage.get(cells)
        data = data[targets.usable(data)]
        if not len(data):
            raise ValueError(
                f"At least one stored row must be usable, got {len(cells)} unusable rows. Collect more first."
            )
        data = targets.fit(data)(data)

        def batches() -> Iterator[Any]:
            for _ in range(num_epochs):
                rng = self.generator
                order = torch.randperm(len(data), generator=rng, device=rng.device) if shuffle else None
                for number, begin in enumerate(range(0, len(data), size)):
                    batch_slice = slice(begin, begin + size)
                    rows = torch.arange(len(data))[batch_slice] if order is None else order[batch_slice]
                    rows = rows.to(self.device)
                    values = {name: data[name].index_select(0, rows) for name in ("inputs", "targets")}
                    if documented_names:
                        inputs, labels = values.values()
                        yield {"train_input": inputs, "train_label": labels, "batch_number": number}
                    else:
                        yield TensorDict(values, [len(rows)])

        return batches()

    # ---- state ------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state exactly; see :meth:`ExperienceBuffer.load_state_dict`.

        If nothing was written before the state was saved, the number of environments may differ.
        """
        state_dict = self._broadcast_state(state_dict)
        writer_state = state_dict.get("writer")
        num_envs = writer_state.get("num_envs") if isinstance(writer_state, Mapping) else None
        with self._rings_for(num_envs if type(num_envs) is int and num_envs > 0 else None):
            super().load_state_dict(state_dict)

    def _broadcast_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state; adapt it to this buffer's ``num_envs`` if nothing was written before it was saved."""
        storage, writer, zero = state.get("storage"), state.get("writer"), torch.zeros(1, dtype=torch.int64)
        if self._num_envs is None or not isinstance(storage, Mapping) or not isinstance(writer, Mapping):
            return state
        empty_storage = {"max_size": self.max_size, "count": 0, "data": None}
        positions = [writer.get(name) for name in ("positions", "oldest")]
        if {name: storage.get(name) for name in empty_storage} != empty_storage or writer.get("num_envs") != 1:
            return state
        if not all(isinstance(value, Tensor) and value.equal(zero) for value in positions):
            return state
        rings = {"num_envs": self._num_envs, **dict.fromkeys(("positions", "oldest"), zero.repeat(self._num_envs))}
        cells = {"max_size": self.max_size * self._num_envs}
        return {**state, "storage": {**storage, **cells}, "writer": {**writer, **rings}}


def _observations(data: TensorDictBase) -> dict[Any, Tensor]:
    """Return the leaves that exist at the root and under ``"next"``, except flags and recurrent states."""
    return {
        key: leaf
        for key, leaf in keyed_leaves(data)
        if path_of(key)[0] not in (NEXT, *BOOKKEEPING, *REPEATED) and entry_of(data, next_key(key)) is not None
    }


def _num_envs_in(data: TensorDictBase, time_dim: int | None, default_time_dim: int | None) -> int:
    """Return the number of environments in the data."""
    if data.ndim < 2:
        return 1
    if not data.numel():
        return int(data.shape[0])
    return data.numel() // data.shape[time_axis(data, time_dim, default_time_dim)]
