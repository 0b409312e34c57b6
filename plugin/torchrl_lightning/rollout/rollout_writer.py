"""Validate rollouts, transpose them to time-major, and write them to the storage."""

from __future__ import annotations

from collections.abc import Collection
from operator import methodcaller
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import COLLECTOR, DONE, IS_INIT, TERMINATED, TRAJ_IDS, VALID
from torchrl_lightning._core.state import Stateful
from torchrl_lightning._core.torchrl_compat import WriterBase, entries_of
from torchrl_lightning._core.tree import (
    check_tensordict,
    is_below,
    keyed_leaves,
    nested_keys,
    path_of,
    schema_difference,
    schema_of,
)
from torchrl_lightning.environments.env_ids import changed_ids
from torchrl_lightning.rollout.batch_sizes import view_leaves
from torchrl_lightning.rollout.rollout_storage import RolloutLayout, RolloutStorage

_TERMINATED_HINT = (
    " Add it: boolean, shape [..., 1], True if the episode reached a terminal state, False if a time limit ended it. "
    "It is never inferred from done."
)


class RolloutWriter(Stateful, WriterBase):
    """Validate rollouts and write them to a :class:`RolloutStorage`, time-major.

    ``extend`` accepts ``[N, T]`` or ``[T, N]``. The time dimension must have the name ``"time"``, as in the batches of
    TorchRL's collectors, or be given by ``time_dim``. ``add`` accepts one step of all environments, ``[N]``.

    Args:
        time_dim: index of the time dimension; ``None`` reads the dimension names.
        recurrent_keys: root keys of recurrent states. If an episode ended, its bootstrap step has zeros instead.

    Raises:
        ValueError: a write raises this error if the time dimension is unknown, the rollout does not fit, keys, shapes
            or dtypes differ from the stored ones, or rewards or values are not finite. Nothing is written.
        KeyError: a written rollout lacks ``("next", "terminated")``.
        TypeError: the registered storage is not a :class:`RolloutStorage`, or flags are not boolean.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(storage=RolloutStorage(5), writer=RolloutWriter(), dim_extend=0)
        >>> flag = torch.zeros(2, 5, 1, dtype=torch.bool)
        >>> following = {"reward": torch.ones(2, 5, 1), "done": flag, "terminated": flag}
        >>> rollout = TensorDict({"action": torch.zeros(2, 5), "next": following}, [2, 5], names=[None, "time"])
        >>> index = buffer.extend(rollout)
        >>> buffer[:].shape, buffer[:].names
        (torch.Size([5, 2]), ['time', None])
    """

    OWNER, VERSION = "rollout writer", 1

    def __init__(
        self, time_dim: int | None = None, *, recurrent_keys: tuple[NestedKey, ...] = ("recurrent_state",)
    ) -> None:
        super().__init__()
        self.time_dim = time_dim
        self.recurrent_keys = nested_keys(recurrent_keys)

    def register_storage(self, storage: Any) -> None:
        """Set the storage to write to."""
        if not isinstance(storage, RolloutStorage):
            raise TypeError(f"The storage of a RolloutWriter must be a RolloutStorage, got {type(storage).__name__}.")
        super().register_storage(storage)

    @property
    def _rollout_storage(self) -> RolloutStorage:
        storage: RolloutStorage | None = self.storage
        if storage is None:
            raise RuntimeError("The writer has no storage. Pass the writer and a RolloutStorage to a replay buffer.")
        return storage

    def extend(self, data: TensorDictBase, time_dim: int | None = None) -> Tensor:
        """Append a rollout and return the written cells ``(t, n)``, in the order of ``data``."""
        storage, time_dim = self._rollout_storage, self.time_dim if time_dim is None else time_dim
        rollout = self.prepare(data, time_dim, storage.num_steps)
        cells = self.write(rollout)
        if data.ndim == 2 and time_axis(data, time_dim) == 1:
            cells = cells.unflatten(0, (rollout.shape[0], -1)).transpose(0, 1).flatten(0, 1)
        # TorchRL's buffer writes this index to the data. If index and data have the same length, the index must be the
        # rows t, because the buffer raises an error for pairs (t, n).
        return cells[:, 0] if cells.shape[0] == data.shape[0] else cells

    def prepare(self, data: TensorDictBase, time_dim: int | None, start: int) -> TensorDictBase:
        """Validate ``data`` for a write that begins at step ``start``, and return a view ``[T, N]``; change nothing."""
        check_tensordict(data)
        rollout, storage = time_major(data, time_dim), self._rollout_storage
        (steps, envs), size, layout = rollout.shape, storage.size, storage.layout
        if not rollout.shape.numel():
            raise ValueError(f"A rollout must not be empty, got {steps} steps of {envs} environments.")
        if start + steps > size:
            stored = f" after {start} stored ones; call empty() first" if start else ""
            raise ValueError(f"A rollout of {steps} steps does not fit into size={size}{stored}.")
        if storage.num_envs is not None and envs != storage.num_envs:
            raise ValueError(f"Expected {storage.num_envs} environments, got {envs} (batch size {list(data.shape)}).")
        check_flags(rollout)
        mask = rollout.get(VALID, None)
        if mask is not None and not bool(mask.all()):
            raise ValueError(
                f"A rollout must not have padded steps, but {VALID!r} marks {int((~mask).sum())}. Set "
                "split_trajs=False in the collector."
            )
        schema = schema_of(rollout, 2)
        if layout.schema and schema != layout.schema:
            raise ValueError(f"The rollout differs from the stored steps: {schema_difference(layout.schema, schema)}.")
        for key in (layout if layout.schema else RolloutLayout(schema)).finite:
            value = rollout.get(key)
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                num_bad = int((~torch.isfinite(value)).sum())
                raise ValueError(
                    f"{key!r} must be finite, but {num_bad} of {value.numel()} values are NaN or infinite. Nothing was "
                    "written."
                )
        return rollout

    def write(self, rollout: TensorDictBase, *, copy: bool = True) -> Tensor:
        """Write a rollout from :meth:`prepare` and return its cells in chronological order.

        With ``copy=False`` the storage takes ownership of the memory if possible.
        """
        storage = self._rollout_storage
        start, steps = storage.num_steps, rollout.shape[0]
        rollout = self._mark_cuts(rollout, storage, start)
        if copy or not storage.take_ownership(rollout):
            storage.set(slice(start, start + steps), rollout)
        storage.store_bootstrap_step(rollout, -1, self.recurrent_keys)
        self.write_count += steps
        cells = self._cell_coordinates(storage, start, steps)
        self.notify(cells)
        return cells

    def _mark_cuts(self, rollout: TensorDictBase, storage: RolloutStorage, start: int) -> TensorDictBase:
        """Return a rollout ``[T, N]`` with ``is_init`` set at each change of the trajectory id."""
        entries = entries_of(rollout)
        is_init, collector, last_ids = entries.get(IS_INIT), entries.get(COLLECTOR), None
        ids = None if collector is None else entries_of(collector).get(TRAJ_IDS[-1])
        if is_init is None or ids is None:
            return rollout
        if start and storage.data is not None:
            last_ids = storage.data.get(TRAJ_IDS)[start - 1].reshape(rollout.shape[1], -1)[:, 0]
        cuts = changed_ids(ids.reshape(*rollout.shape, -1)[..., 0], 0, last_ids)
        mask = cuts.view(*cuts.shape, *[1] * (is_init.ndim - 2))
        if not (mask & (is_init == 0)).any():
            return rollout
        marked = rollout.copy()
        marked.set(IS_INIT, is_init.masked_fill(mask, 1))
        return marked

    def add(self, data: TensorDictBase) -> int:
        """Append one step of all environments, ``[N]``, and return its row."""
        check_tensordict(data)
        if data.ndim != 1:
            raise ValueError(
                f"The data of add must have the batch size [N], one step of all environments, got {list(data.shape)}. "
                "Use extend for a rollout."
            )
        row = self._rollout_storage.num_steps
        step = view_leaves(data, methodcaller("unsqueeze", 0), torch.Size([1, *data.shape]))
        self.write(self.prepare(step, 0, row))
        return row

    def overwrite(self, row: int, data: TensorDictBase) -> None:
        """Replace a stored row with one step of all environments, ``[N]``."""
        self.prepare(data.unsqueeze(0), 0, 0)
        self._rollout_storage.set(row, data)
        self.write_count += 1

    def complete(self, step: TensorDictBase) -> TensorDictBase:
        """Return a step ``[N]`` with missing entries filled from the stored bootstrap step.

        Raises:
            KeyError: the previous step does not determine a missing entry.
        """
        step, storage = step.copy(), self._rollout_storage
        bootstrap_step, schema = storage.bootstrap_step, storage.schema
        if bootstrap_step is not None and bootstrap_step.shape == step.shape:
            needed = schema.keys() - set(step.keys(include_nested=True))
            missing = {key: value for key, value in keyed_leaves(bootstrap_step) if key in needed}
            self._check_new_episodes(bootstrap_step.get("is_init"), missing)
            for key, value in missing.items():
                step.set(key, value)
        elif step.get("next", None) is not None:
            self._complete_first(step)
        if step.get("is_init", None) is None and (not schema or "is_init" in schema):
            step.set("is_init", torch.ones(*step.shape, 1, dtype=torch.bool, device=step.device))
        return step

    def _check_new_episodes(self, done: Tensor, missing: Collection[NestedKey]) -> None:
        names = [
            key
            for key in missing
            if key != "is_init" and not any(is_below(key, state) for state in self.recurrent_keys)
        ]
        if names and bool(done.any()):
            rows = done.flatten(1).any(-1).nonzero().flatten().tolist()
            raise KeyError(
                f"The step must have {names}: the previous step ended an episode in the environments {rows}, so the "
                "stored entries belong to the old episode. Pass the first entries of the new episode."
            )

    def _complete_first(self, step: TensorDictBase) -> None:
        next_step = step.get("next")
        names = list(dict.fromkeys(path_of(key)[0] for key in RolloutLayout(schema_of(step, 1)).carried_keys))
        for name in names:
            if name in self.recurrent_keys and step.get(name, None) is None:
                step.set(name, next_step.get(name).clone().zero_())
        if names and not any(step.get(name, None) is not None for name in names if name not in self.recurrent_keys):
            raise KeyError(
                f"The first step must have one of {names}: without an earlier step, they cannot be carried over."
            )

    def _cell_coordinates(self, storage: RolloutStorage, start: int, steps: int) -> Tensor:
        envs = storage.num_envs or 0
        flat = torch.arange(start * envs, (start + steps) * envs, device=storage.device)
        return torch.stack((flat // envs, flat % envs), -1)


def check_flags(data: TensorDictBase) -> None:
    """Check that the reward and boolean ``done`` and ``terminated`` flags exist."""
    next_data = data.get("next", None)
    if next_data is None:
        raise KeyError(
            'The rollout must have the entry "next" with reward, flags and observation after each step, as in TorchRL.'
        )
    for key, hint in (("terminated", _TERMINATED_HINT), ("reward", ""), ("done", "")):
        if next_data.get(key, None) is None:
            raise KeyError(f'("next", "{key}") is missing, got {sorted(next_data.keys())}.{hint}')
    for flag in (DONE, TERMINATED):
        if data.get(flag).dtype is not torch.bool:
            raise TypeError(f"{flag} must be boolean, got {data.get(flag).dtype}; convert it with .bool().")


def time_axis(data: TensorDictBase, time_dim: int | None) -> int:
    """Return ``time_dim`` or, if it is None, the dimension named ``"time"``; raise ValueError without both."""
    if time_dim is not None:
        if not -data.ndim <= time_dim < data.ndim:
            raise ValueError(f"time_dim must be a dimension of the batch size {list(data.shape)}, got {time_dim}.")
        return time_dim % data.ndim
    if "time" in data.names:
        return int(data.names.index("time"))
    raise ValueError(
        f"The time dimension of the batch size {list(data.shape)} is unknown, got the names {data.names}. "
        'Name it, e.g. rollout.names = [None, "time"], or pass time_dim=.'
    )


def time_major(data: TensorDictBase, time_dim: int | None) -> TensorDictBase:
    """Return ``data`` as a view ``[T, N]``; a single time dimension ``[T]`` becomes ``[T, 1]``."""
    axis = time_axis(data, time_dim)
    if data.ndim == 1:
        return data.unsqueeze(1)
    if data.ndim != 2:
        raise ValueError(f"The batch size of a rollout must be [N, T] or [T, N], got {list(data.shape)}.")
    if axis == 0:
        return data
    return view_leaves(data, methodcaller("transpose", 0, 1), data.shape[::-1], data.names[::-1])
