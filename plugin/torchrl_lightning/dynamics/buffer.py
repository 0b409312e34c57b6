"""PyTorchRL's buffer of transitions that models of an environment learn from."""

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

from torchrl_lightning.dynamics.targets import IS_RESET, DynamicsTargets
from torchrl_lightning.entries import check_tensordict, entry_of, keyed_leaves, next_key, path_of
from torchrl_lightning.environments import environment_specs
from torchrl_lightning.environments.specs import space_to_spec
from torchrl_lightning.keys import BOOKKEEPING, NEXT, REPEATED
from torchrl_lightning.protocols import EnvsApi
from torchrl_lightning.ranges import Check, boolean, integer
from torchrl_lightning.replay import ExperienceBuffer, RingStorage, RingWriter
from torchrl_lightning.rollout.names import to_documented
from torchrl_lightning.rollout.verbs import DocumentedVerbs


def _anything(value: Any, name: str) -> Any:
    return value


class MBReplayBuffer(ExperienceBuffer, DocumentedVerbs):
    """Replay buffer of PyTorchRL's model-based algorithms: appends transitions, and serves them as inputs and targets.

    One row is a step of all environments; in a batch, they are folded into one dimension. ``generate_batches`` serves
    what :class:`DynamicsTargets` makes of all rows, standardised by themselves. TorchRL's verbs work beside the
    documented ones: ``sample`` draws plain transitions.

    Args:
        size: capacity along time.
        device: where rows lie and batches come out.
        actor: if it has ``dynamics_model.reward_function``, rewards are analytic; its ``action_space`` is that of the
            actions.
        algorithm: any object; kept.
        envs: environments with ``num_envs``; vector environments, Gymnasium's or TorchRL's, also give the action spec.
        reward_function: an analytic reward (see :class:`DynamicsTargets`); that of the actor's model if None. Without
            one, the reward is a target.
        action_spec: spec of an action, which discrete actions need; that of ``envs`` or ``actor`` if None.
        autoreset: whether the next observation of a step that ended its episode is the first of the following one, as
            PyTorchRL's environments give it. Such a step is kept, marked by ``("next", "is_init")``, and comes in no
            batch. What our collectors store needs no such care.
        num_envs: number of environments; that of ``envs``, or of the first write, if None.
        generator: random generator; seeded from torch's global one if None.
        batch_size: rows that ``sample()`` draws.
        transform: a TorchRL transform, as in :class:`ExperienceBuffer`.

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
    HANDED_OVER: ClassVar[tuple[str, ...]] = ("actor", "algorithm", "batch_size", "envs", "generator", "num_envs")

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
        **dict.fromkeys(("actor", "algorithm", "envs", "reward_function", "action_spec"), _anything),
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
        )

    @property
    def max_size(self) -> int:
        """Capacity along time; setting it keeps the newest rows."""
        return self._max_size

    @max_size.setter
    def max_size(self, size: int) -> None:
        self._lay(integer(size, "max_size"), self._num_envs)

    @property
    def size(self) -> int:
        """Rows stored along time, those of the fullest environment."""
        return int(self.writer.filled.max())

    @property
    def step(self) -> int:
        """Row that the next transition goes to."""
        return int(self.writer.positions.max()) % self.max_size

    @property
    def num_envs(self) -> int | None:
        """Number of environments; None before the first write."""
        return self._num_envs

    @property
    def device(self) -> torch.device:
        """Where rows lie."""
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
        """Write steps; see :meth:`ExperienceBuffer.extend`. The first ones, ``[n]``, are of one environment.

        Raises:
            KeyError: there is no next observation, or ``autoreset`` finds no ``("next", "done")``.
        """
        check_tensordict(data)
        data = self._marked(data)
        num_envs = _width(data, time_dim) if env_ids is None else None
        with self._laid(None if 0 in data.shape else num_envs):
            return super().extend(data, env_ids, time_dim=time_dim, update_priority=update_priority)

    def _marked(self, data: TensorDictBase) -> TensorDictBase:
        """Mark the steps whose next observation is that of a reset; refuse data without next observations."""
        if self.storage.cells is None and not _observations(data):
            raise KeyError(
                "A transition has no next observation: no entry is there both alone and under 'next'; it has "
                f"{sorted(map(str, data.keys(True, True)))}. Write NextObservation, the last one of its episode where "
                "that ends."
            )
        if not self.autoreset:
            return data
        done = entry_of(data, ("next", "done"))
        if done is None:
            raise KeyError("autoreset=True needs the entry ('next', 'done') to tell where an episode ended.")
        return data.copy().set(IS_RESET, done.clone())

    def _write_step(self, step: TensorDictBase) -> None:
        with self._laid(len(step)):
            self.extend(step)

    def _write_slice(self, data: TensorDictBase, time_dim: int | None, copy: bool) -> None:
        self.extend(data, time_dim=time_dim)

    def insert_data_slice(
        self, new_data: TensorDictBase | Mapping[str, Any], time_dim: int | None = None, *, copy: bool = True
    ) -> None:
        """Append transitions; of more than fit, the newest are kept.

        Args:
            new_data: ``[N, T]`` with a dimension named ``"time"``, any order with ``time_dim``, or ``[T]`` of one
                environment; or a dict with the documented names, time-major ``[T, N, ...]``.
            time_dim: which dimension is time.
            copy: rows are always copied.
        """
        super().insert_data_slice(new_data, time_dim, copy=copy)

    def insert_single_tensor_slice(
        self, tensor_storage: MutableMapping[str, Tensor], tensor_key: str, tensor_values: Tensor
    ) -> int:
        """Write values of one entry to where ``insert_data_slice`` would, and move nothing.

        Args:
            tensor_storage: entries ``[max_size, ...]``; a missing one is added, zeros.
            tensor_key: the entry.
            tensor_values: ``[T, ...]``; of more than fit, the newest are kept.

        Returns:
            How many values came, ``T``.

        Raises:
            ValueError: shape or dtype of a row differ from those that are there.

        Examples:
            >>> columns = {}
            >>> MBReplayBuffer(3).insert_single_tensor_slice(columns, "Reward", torch.arange(5))
            5
            >>> columns["Reward"].tolist()
            [3, 4, 2]
        """
        values = torch.as_tensor(tensor_values)
        known = tensor_storage.get(tensor_key)
        expected = torch.Size([self.max_size, *values.shape[1:]])
        column = values.new_zeros(expected) if known is None else known
        if column.shape != expected or column.dtype != values.dtype:
            raise ValueError(
                f"Entry {tensor_key!r} is {list(column.shape)} {column.dtype}, rows of {list(values.shape[1:])} "
                f"{values.dtype} do not fit into {self.max_size} of it."
            )
        length = len(values)
        kept = min(length, self.max_size)
        rows = (self.step + torch.arange(length - kept, length)) % self.max_size
        column[rows.to(column.device)] = values[length - kept :].to(column.device)
        tensor_storage[tensor_key] = column
        return length

    def _reserve(self, step: TensorDictBase) -> None:
        if self.size:
            raise ValueError(f"{self.size} steps are stored; call reset() before init_tensors.")
        with self._laid(len(step)):
            self.storage.allocate(self._marked(step))

    @contextmanager
    def _laid(self, num_envs: int | None) -> Iterator[None]:
        """Lay rings for so many environments, where there are none yet and what follows does not fail."""
        first = self._num_envs is None and num_envs is not None
        if first:
            self._lay(self.max_size, num_envs)
        try:
            yield
        except BaseException:
            if first:
                self._lay(self.max_size, None)
            raise

    def _lay(self, size: int, num_envs: int | None) -> None:
        """Lay rings of ``size`` steps for so many environments, and move the newest rows there."""
        storage = RingStorage(size * (num_envs or 1), device=self.storage.device)
        old = self.writer
        writer = RingWriter(num_envs or 1, done_reduce=old.done_reduce, check_successors=False)
        writer.register_storage(storage)
        if num_envs == self.writer.num_envs:
            writer.rings.go_on_from(self.writer.rings)
        if self.storage.data is not None and num_envs is not None:
            storage.allocate(self.storage.data[:1])
        for env in range(self.writer.num_envs if self.size else 0):
            ring = torch.tensor([env])
            for cells in self._episodes_of(env):
                writer.cut(ring)
                writer.extend(self.storage.get(cells), ring)
            if old.index is not None and not old.index.is_running(ring.numpy()).all():
                writer.cut(ring)
        writer.check_successors = old.check_successors
        writer.write_count = old.write_count  # they are not written, but moved
        with self.locked():
            self.set_storage(storage)
            self.set_writer(writer)
            self.set_rng(self.generator)
            self.clear_sampler()
        self._max_size, self._num_envs = size, num_envs

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _cells_of(self, env: int) -> Tensor:
        """Return the filled cells of an environment in order of age."""
        steps = torch.arange(int(self.writer.oldest[env]), int(self.writer.positions[env]))
        return self.writer.cell(torch.tensor(env), steps)

    def _episodes_of(self, env: int) -> list[Tensor]:
        """Return the filled cells of the episodes of an environment, so far as they are known, in order of age."""
        cells, index = self._cells_of(env), self.writer.index
        if index is None or not len(cells):
            return [cells] if len(cells) else []
        position = self.writer.rings.position_of(cells)
        first = index.begin(torch.full_like(position, env), position)
        return list(cells.split(first.unique_consecutive(return_counts=True)[1].tolist()))

    def get_data_slice(self, start_pos: int, end_pos: int, documented_names: bool = False) -> Any:
        """Return a copy of the rows ``[start_pos, end_pos)`` in order of age, ``[T, N]`` named ``("time", None)``.

        Args:
            start_pos: first row; 0 is the oldest stored one.
            end_pos: behind the last row, at most ``size``.
            documented_names: return a dict with the documented names instead.

        Raises:
            IndexError: such rows are not stored.
            RuntimeError: environments hold different numbers of rows.
        """
        if not 0 <= start_pos <= end_pos <= self.size or start_pos == self.size:
            raise IndexError(f"Rows [{start_pos}, {end_pos}) are not stored; there are [0, {self.size}).")
        if not self.writer.is_even:
            raise RuntimeError(f"The environments hold {self.writer.filled.tolist()} rows; read them by buffer.sample.")
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
        """What makes inputs and targets of the stored rows; a new one each time.

        Raises:
            RuntimeError: nothing is stored.
            ValueError: actions are integers, and their spec is unknown.
        """
        data = self.storage.data
        if data is None:
            raise RuntimeError("Nothing is stored: insert transitions first.")
        leaves = _observations(data).items()
        observed = Composite({key: Unbounded(leaf.shape[1:], dtype=leaf.dtype) for key, leaf in leaves})
        model = getattr(self.actor, "dynamics_model", None)
        reward = self.reward_function or getattr(model, "reward_function", None)
        return DynamicsTargets(observed, self._action_spec(data.get("action")), reward=reward)

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
                f"Actions are {action.dtype}, so that one-hot columns need to know how many there are; give "
                "action_spec=, or envs= or an actor with an action_space."
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
        """Iterate over all rows that a model may learn from, as inputs and targets, standardised by themselves.

        Args:
            num_mini_batch: not used, as documented; the size says how many there are.
            mini_batch_size: rows in each; the last one of a pass may be short, and is never empty.
            num_epochs: passes.
            shuffle: a new order for each pass; otherwise that of age.
            documented_names: yield dicts of ``train_input``, ``train_label`` and ``batch_number`` instead.

        Returns:
            An iterator over TensorDicts ``[B]`` with ``inputs`` and ``targets``.

        Raises:
            RuntimeError: nothing is stored.
            ValueError: none of the stored rows can be learned from, or a number is NaN or infinite; names its column.
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
            raise ValueError(f"None of the {len(cells)} stored rows can be learned from: collect more first.")
        data = targets.fit(data)(data)

        def batches() -> Iterator[Any]:
            for _ in range(num_epochs):
                rng = self.generator
                order = torch.randperm(len(data), generator=rng, device=rng.device) if shuffle else None
                for number, begin in enumerate(range(0, len(data), size)):
                    part = slice(begin, begin + size)
                    rows = torch.arange(len(data))[part] if order is None else order[part]
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

        One in which nothing was ever stored fits any number of environments.
        """
        state_dict = self._widened(state_dict)
        held = state_dict.get("writer")
        num_envs = held.get("num_envs") if isinstance(held, Mapping) else None
        with self._laid(num_envs if type(num_envs) is int and num_envs > 0 else None):
            super().load_state_dict(state_dict)

    def _widened(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state in which nothing was ever stored as one of as many environments as there are here."""
        storage, writer, empty = state.get("storage"), state.get("writer"), torch.zeros(1, dtype=torch.int64)
        if self._num_envs is None or not isinstance(storage, Mapping) or not isinstance(writer, Mapping):
            return state
        unlaid = {"max_size": self.max_size, "count": 0, "data": None}
        counts = [writer.get(name) for name in ("positions", "oldest")]
        if {name: storage.get(name) for name in unlaid} != unlaid or writer.get("num_envs") != 1:
            return state
        if not all(isinstance(each, Tensor) and each.equal(empty) for each in counts):
            return state
        rings = {"num_envs": self._num_envs, **dict.fromkeys(("positions", "oldest"), empty.repeat(self._num_envs))}
        cells = {"max_size": self.max_size * self._num_envs}
        return {**state, "storage": {**storage, **cells}, "writer": {**writer, **rings}}


def _observations(data: TensorDictBase) -> dict[Any, Tensor]:
    """Return the leaves that are both at the root and under ``"next"``, but for flags and recurrent states."""
    return {
        key: leaf
        for key, leaf in keyed_leaves(data)
        if path_of(key)[0] not in (NEXT, *BOOKKEEPING, *REPEATED) and entry_of(data, next_key(key)) is not None
    }


def _width(data: TensorDictBase, time_dim: int | None) -> int:
    """Return of how many environments data are."""
    if data.ndim < 2:
        return 1
    axis = data.names.index("time") if time_dim is None and "time" in data.names else time_dim
    return int(data.shape[0 if axis in (1, -1) else 1])
