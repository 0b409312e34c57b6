"""Time-major storage ``[T, N]`` of one rollout, and the roles of its entries."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.utils import torch_to_numpy_dtype_dict

from torchrl_lightning._core.keys import DONE, FLAGS, NEXT, REWARD
from torchrl_lightning._core.memory import check_free_memory, pack_tree, unpack_tree
from torchrl_lightning._core.mixins import is_spawning
from torchrl_lightning._core.state import Attribute, Stateful, bounded_integer, mapping, same
from torchrl_lightning._core.torchrl_compat import StorageBase, new_tensordict
from torchrl_lightning._core.tree import (
    Schema,
    Tree,
    is_below,
    join,
    keyed_leaves,
    map_leaves,
    path_of,
    schema_difference,
    schema_of,
    to_tensordict,
    tree_of,
)
from torchrl_lightning._core.tree_checks import check_tree
from torchrl_lightning._core.validators import Check, integer, optional


class RolloutLayout:
    """Roles of the entries of a rollout.

    Args:
        schema: shape and dtype of each entry.

    Attributes:
        finite: keys of the entries that must be finite: reward and values.
        carried_keys: root keys of the entries that a step can copy from ``"next"`` of the previous step. Rewards, flags
            and values are not among them.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        paths = [path_of(key) for key in schema]
        self.finite: list[NestedKey] = [
            REWARD,
            *(join((), path) for path in paths if path[0].endswith("state_value")),
        ]
        self.carried_keys: list[NestedKey] = [
            join((), path[1:])
            for path in paths
            if path[0] == NEXT
            and path[1] not in ("reward", *FLAGS)
            and not path[1].endswith(("state_value", "_reward"))
        ]
        self._has_entries: dict[tuple[NestedKey, ...], bool] = {}

    def has_entries(self, roots: tuple[NestedKey, ...]) -> bool:
        """Return True if an entry exists at or below one of the keys."""
        if roots not in self._has_entries:
            self._has_entries[roots] = any(is_below(key, root) for key in self.schema for root in roots)
        return self._has_entries[roots]


def _num_envs_check(storage: Any) -> Check:
    return optional(bounded_integer(1) if storage.num_envs is None else same(storage.num_envs, storage.OWNER))


def _optional_dict(step: TensorDictBase | None) -> dict[str, Any] | None:
    return None if step is None else step.to_dict()


class RolloutStorage(Stateful, StorageBase):
    """Store one rollout time-major, ``[T, N]``, with its bootstrap step.

    Cell ``(t, n)`` holds step ``t`` of environment ``n``; the buffer needs ``dim_extend=0``. The next write removes
    entries that were added to :attr:`rollout`, for example advantages. :attr:`bootstrap_step` has the root entries of
    step ``T`` (observation, is_init, recurrent state). ``empty`` keeps this step for the next rollout.

    Args:
        size: capacity along time; writing a longer rollout raises an error.
        num_envs: number of environments; ``None`` uses the number in the first write.
        device: device of the data.

    Raises:
        ValueError: ``size`` or ``num_envs`` is not positive.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> storage = RolloutStorage(4, num_envs=2)
        >>> data = TensorDict({"action": torch.arange(6).view(3, 2)}, [3, 2])
        >>> storage.set(slice(0, 3), data)
        >>> storage.num_steps, storage.rollout.shape
        (3, torch.Size([3, 2]))
    """

    OWNER, VERSION = "rollout storage", 1
    STATE = {
        "size": Attribute(),
        "num_envs": Attribute(check_for=_num_envs_check),
        "num_steps": Attribute(check_for=lambda storage: bounded_integer(0, storage.size)),
        "data": Attribute(optional(mapping), "_filled_dict"),
        "added": Attribute(mapping, "_added_dict"),
        "tail": Attribute(optional(mapping), "bootstrap_step", to_saved=_optional_dict),
    }

    def __init__(self, size: int, *, num_envs: int | None = None, device: torch.device | str = "cpu") -> None:
        integer(size, "size")
        if num_envs is not None:
            integer(num_envs, "num_envs")
        super().__init__(size * (num_envs or 1), ndim=2, device=device)
        self.size = size
        self.num_envs = num_envs
        self.num_steps = 0
        self.bootstrap_step: TensorDict | None = None
        self.layout = RolloutLayout({})
        self._rollout: TensorDict | None = None

    @property
    def schema(self) -> Schema:
        """Shape and dtype of each entry; empty before the first write."""
        return self.layout.schema

    @property
    def shape(self) -> torch.Size | None:
        """Shape ``[T, N]`` of the filled part; ``None`` before the first write."""
        return None if self.data is None else torch.Size([self.num_steps, self.num_envs or 0])

    @property
    def rollout(self) -> TensorDict:
        """A live view of the stored steps, ``[T, N]``, with the entries added since the last write.

        The dimension names are ``("time", None)``.

        Raises:
            RuntimeError: nothing is stored.
        """
        if self._rollout is None:
            if self.data is None or not self.num_steps:
                raise RuntimeError("The rollout storage is empty: write a rollout first (insert_data_slice or extend).")
            self._rollout = self.data[: self.num_steps]
            self._rollout.names = ["time", None]
        return self._rollout

    def allocate(self, row: TensorDictBase) -> None:
        """Reserve memory for ``size`` rows like ``row`` (batch size ``[N]``).

        Raises:
            ValueError: the number of environments differs from ``num_envs``, or the memory does not suffice.
        """
        if row.ndim != 1 or (self.num_envs is not None and row.shape[0] != self.num_envs):
            raise ValueError(
                f"The batch size must be [{self.num_envs or 'N'}], one row for each environment, got {list(row.shape)}."
            )
        rows, envs = self.size, row.shape[0]
        self._check_free_memory(schema_of(row, 0), rows)
        self.num_envs = envs
        self.max_size = rows * envs
        tree = map_leaves(
            lambda value: torch.zeros((rows, *value.shape), dtype=value.dtype, device=self.device), tree_of(row)
        )
        self.data = to_tensordict(tree, torch.Size([rows, envs]))
        self.layout = RolloutLayout(schema_of(row, 1))

    def take_ownership(self, rollout: TensorDictBase) -> bool:
        """Take ownership of the memory of a rollout ``[size, N]`` instead of copying it.

        Returns:
            True on success. Every leaf must be contiguous and on this device, and the rollout must have ``size`` steps.
        """
        fits = [leaf.is_contiguous() and leaf.device == self.device for leaf in rollout.values(True, True)]
        if type(rollout) is not TensorDict or rollout.shape[0] != self.size or not all(fits):
            return False
        self.data = rollout.copy()
        if not self.schema:
            self.layout = RolloutLayout(schema_of(rollout, 2))
        self.num_envs = rollout.shape[1]
        self.max_size = rollout.shape.numel()
        self.finish_write(self.size)
        return True

    def _check_free_memory(self, row: Schema, rows: int) -> None:
        needed = rows * sum(math.prod(shape) * dtype.itemsize for shape, dtype in row.values())
        check_free_memory(
            needed,
            f"RolloutStorage(size={rows})",
            "lower size, take fewer environments, or store smaller dtypes",
            device=self.device,
        )

    def set(self, cursor: Any, data: TensorDictBase, *, set_cursor: bool = True) -> None:
        """Write one row ``[N]`` at an integer cursor, or rows ``[T, N]`` at a slice.

        With ``set_cursor=False``, edit the cells at any index in place, as in TorchRL.
        """
        if set_cursor and not isinstance(cursor, int | slice):
            raise TypeError(
                f"cursor must be an integer or a slice, got {type(cursor).__name__}. Use a RolloutWriter as the "
                "buffer's writer."
            )
        if self.data is None:
            self.allocate(data if isinstance(cursor, int) else data[0])
        if not set_cursor:
            super().set(cursor, data, set_cursor=False)
            return
        assert self.data is not None
        for key, value in keyed_leaves(data):
            self.data.get(key)[cursor].copy_(value)
        self.finish_write(max(self.num_steps, cursor + 1 if isinstance(cursor, int) else cursor.stop))

    def store_bootstrap_step(self, data: TensorDictBase, row: Any, recurrent_keys: Collection[NestedKey]) -> None:
        """Store the step after a row as bootstrap step; if the episode ended, set the recurrent states to 0."""
        done = data.get(DONE)[row].to(self.device, copy=True)
        bootstrap_step, next_data = TensorDict({}, done.shape[:1]), data.get(NEXT)
        for key in self.layout.carried_keys:
            value = next_data.get(key)[row].to(self.device, copy=True)
            if path_of(key)[0] in recurrent_keys or key in recurrent_keys:
                value.masked_fill_(done.reshape(len(done), *[1] * (value.ndim - 1)), 0)
            bootstrap_step.set(key, value)
        bootstrap_step.set("is_init", done)
        self.bootstrap_step = bootstrap_step

    def finish_write(self, num_steps: int) -> None:
        """Set the number of stored steps after a write, and drop added entries."""
        self._rollout = None
        self.num_steps = num_steps
        self.record_cursor(num_steps - 1)
        self.set_length(num_steps * (self.num_envs or 0))

    def get(self, index: Any) -> TensorDict:
        """Return the cells at an index, for example a pair of coordinate tensors ``(t, n)`` of equal shape."""
        rollout = self.rollout
        if isinstance(index, tuple) and len(index) == 2 and all(isinstance(i, Tensor) for i in index):
            flat = torch.as_tensor(index[0] * self.num_envs + index[1])
            if (flat < 0).any():
                raise IndexError(f"indices of steps must be at least 0, got {index}.")
            batch = gather(flatten_tree(rollout), flat.reshape(-1))
            return batch if flat.ndim == 1 else batch.reshape(flat.shape)
        return rollout[index]

    def clear(self) -> None:
        """Discard the stored steps, but keep the bootstrap step."""
        self._rollout = None
        self.num_steps = 0
        super().clear()

    def resize(self, size: int) -> None:
        """Change the capacity along time and keep the stored steps.

        Raises:
            ValueError: the stored steps do not fit, or the memory does not suffice.
        """
        integer(size, "size")
        if size < self.num_steps:
            raise ValueError(
                f"size must be at least {self.num_steps}, the number of stored steps, got {size}. Call empty() first."
            )
        if self.data is None:
            self.size, self.max_size = size, size * (self.num_envs or 1)
            return
        self._check_free_memory(schema_of(self.data, 1), size)
        old_data, num_steps, added = self.data, self.num_steps, self.added()
        self.size = size
        self.allocate(old_data[0])
        if num_steps:
            self.set(slice(0, num_steps), old_data[:num_steps])
        for key, value in added.items():
            self.rollout.set(key, value)

    def added(self) -> dict[NestedKey, Tensor]:
        """Return the new and replaced entries of :attr:`rollout` since the last write."""
        stored = self.data
        if stored is None or not self.num_steps:
            return {}
        return {
            key: value
            for key, value in keyed_leaves(self.rollout)
            if key not in self.schema or value.data_ptr() != stored.get(key).data_ptr()
        }

    def __getstate__(self) -> dict[str, Any]:
        # A pickled view would not share memory with its cells. So unpickling builds the view and adds its new entries.
        state = {**super().__getstate__(), "_rollout": {} if self._rollout is None else self.added()}
        if is_spawning() or self.data is None:
            return state
        added = {key: value.clone() for key, value in state["_rollout"].items()}
        return {**state, "_storage": None, "_rollout": added, "packed": pack_tree(tree_of(self.data), self.num_steps)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state.get("packed")
        super().__setstate__({name: value for name, value in state.items() if name not in ("_rollout", "packed")})
        self._rollout = None
        if packed is not None:
            tree = unpack_tree(packed, self.num_steps, self.size)
            self.data = to_tensordict(tree, torch.Size([self.size, self.num_envs or 0]))
        for key, value in state["_rollout"].items():
            self.rollout.set(key, value)

    @property
    def _filled_dict(self) -> dict[str, Any] | None:
        return None if self.data is None else self.data[: self.num_steps].to_dict()

    @property
    def _added_dict(self) -> dict[str, Any]:
        return TensorDict(self.added(), self.shape or []).to_dict()

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        steps, envs, data, bootstrap_step = (values[name] for name in ("num_steps", "num_envs", "data", "tail"))
        if (envs is None and (data, bootstrap_step) != (None, None)) or (data is None and (steps or values["added"])):
            raise ValueError(f"The state must contain the data of its {steps} steps of {envs} environments.")
        batch = torch.Size([steps, envs or 0])
        for tree, size in ((data, batch), (values["added"] or None, batch), (bootstrap_step, batch[1:])):
            if tree is not None:
                check_tree(tree, size, self.OWNER)
        if data is None:
            return
        schema = schema_of(data, 2)
        if self.schema and schema != self.schema:
            raise ValueError(
                f"The entries of the state differ from the stored ones: {schema_difference(self.schema, schema)}."
            )
        if self.data is None:
            self._check_free_memory({k: (torch.Size([envs, *f]), dtype) for k, (f, dtype) in schema.items()}, self.size)
        for key, spec in schema_of(bootstrap_step or {}, 1).items():
            if schema.get(key, spec) != spec:
                raise ValueError(
                    f"The bootstrap step in the state has {key!r} as {spec}, but the steps have {schema[key]}."
                )

    def apply_state(self, values: Mapping[str, Any]) -> None:
        """Load a rollout and its bootstrap step."""
        steps, envs, data, bootstrap_step = (values[name] for name in ("num_steps", "num_envs", "data", "tail"))
        if data is not None and self.data is None:
            row = map_leaves(lambda value: value.new_empty((envs, *value.shape[2:])), data)
            self.allocate(to_tensordict(row, torch.Size([envs])))
        self.clear()
        if steps:
            self.set(slice(0, steps), to_tensordict(data, torch.Size([steps, envs])))
            for key, value in keyed_leaves(values["added"]):
                self.rollout.set(key, value.to(self.device, copy=True))
        self.bootstrap_step = (
            None
            if bootstrap_step is None
            else to_tensordict(bootstrap_step, torch.Size([envs])).to(self.device).clone()
        )


def flatten_tree(rollout: TensorDictBase) -> Tree:
    """Return the leaves of a rollout ``[T, N]`` as a nested dict of ``[T * N, ...]`` views."""
    return map_leaves(lambda value: value.flatten(0, 1), tree_of(rollout))


def gather(tree: Tree, index: Tensor) -> TensorDict:
    """Return the rows ``index`` (``[B]``, at least 0) of every leaf of a flat tree."""
    return new_tensordict(_gather(tree, index, index.numpy() if index.is_cpu else None), index.shape)


def _gather(tree: Tree, index: Tensor, rows: Any) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(value, Tensor):
            entries[key] = new_tensordict(_gather(value, index, rows), index.shape)
        elif rows is not None and value.is_contiguous() and value.dtype in torch_to_numpy_dtype_dict:
            # NumPy needs a third of torch's time for thousands of rows.
            entries[key] = torch.from_numpy(value.detach().numpy().take(rows, 0))
        else:
            entries[key] = value.index_select(0, index)
    return entries
