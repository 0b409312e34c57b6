"""Prioritized experience replay that does not need TorchRL's compiled extension."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import PrioritizedSampler as _PrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._core.state import (
    GENERATOR,
    Attribute,
    Stateful,
    any_value,
    bounded_integer,
    check_state,
    number,
    state_error,
    tensor,
)
from torchrl_lightning._core.torchrl_compat import SamplerHooks
from torchrl_lightning._core.tree import nested_key
from torchrl_lightning._core.validators import Checked, boolean, integer, non_negative, one_of, optional
from torchrl_lightning.kernels.indices import as_integers
from torchrl_lightning.replay.positions import MissingStepsError
from torchrl_lightning.replay.priorities import REDUCTIONS, Priorities, ValidStarts, reduce_priorities
from torchrl_lightning.replay.rings import Rings, rings_of, stored_cells

WEIGHT_NORMS = ("batch", "buffer", None)
FLOATS = (torch.float32, torch.float64)


class PrioritizedSampler(Stateful, SamplerHooks, _PrioritizedSampler):
    """Sample cell ``i`` with probability ``P(i) = (p_i + eps)^alpha / sum_j (p_j + eps)^alpha``.

    Importance weights are ``w_i = (N P(i))^-beta``, divided by the largest weight of the batch or of the buffer. New
    data get the highest priority so far, at least ``initial_priority``. Empty cells are never drawn. A sample or an
    update costs ``O(batch * log capacity)``. Setting ``alpha`` costs ``O(capacity)``, setting ``beta`` costs nothing;
    TorchRL's schedulers set both.

    A batch contains ``priority_weight`` and ``write_generation``, both ``[B]``. With ``write_generation``,
    :meth:`update_priority` ignores cells that were overwritten after sampling.

    With ``batch_length``, the sampler draws windows of successive stored steps of one environment, as batches
    ``[B, T]``. A window may continue in the next episode. Every step counts, so the batch has no ``mask``, unlike
    batches of a :class:`SequenceSampler`. The priority of a window is stored at its first step. This priority stays
    unchanged while the window cannot be drawn, e.g. because the end of the window is not stored yet. ``N`` counts the
    windows that can be drawn. The other entries are expanded to ``[B, T]``. The additional entry ``importance_weights``
    is ``(p + eps)^alpha`` divided by the mean of its non-zero values, so that ``priority_weight`` with
    ``weight_norm=None`` equals ``importance_weights ** -beta``.

    Schaul, Quan, Antonoglou, Silver: Prioritized Experience Replay. https://arxiv.org/abs/1511.05952

    Args:
        max_capacity: the ``max_size`` of the storage; None lets an :class:`ExperienceBuffer` set this number.
        alpha: exponent of the priorities, not negative; 0 samples uniformly.
        beta: exponent of the importance weights, not negative; 1 corrects the full bias.
        eps: added to every priority.
        dtype: dtype of priorities and trees, or its name.
        reduction: reduces further dimensions to one priority per cell: max, min, mean or median.
        max_priority_within_buffer: give new data the highest stored priority, not the highest priority ever set.
        device: device of the trees; the CPU by default.
        priority_key: the entry into which a loss writes new priorities; the sampler stores this key without using it.
        stratified: draw one cell from each of ``B`` equal parts of the total priority; if False, draw independently.
        weight_norm: scale the largest weight of the ``"batch"`` or ``"buffer"`` to 1; None does not scale.
        initial_priority: lowest priority of new data.
        batch_length: steps of a window; None for single cells, ``[B]``. A sampler built with None draws only single
            cells, unless ``num_earliest_frames_ignored`` is set.
        num_earliest_frames_ignored: number of oldest stored steps of each environment at which no draw begins.
        generator: random generator; a buffer replaces it by the buffer's generator.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0, eps=0.0)
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        >>> index = buffer.extend(TensorDict({"a": torch.arange(3)}, [3]))
        >>> buffer.update_priority(index, torch.tensor([0.0, 1.0, 3.0]))
        >>> batch = buffer.sample()
        >>> batch["index"].tolist(), batch["priority_weight"].tolist()
        ([1, 2, 2, 2], [1.0, 0.333..., 0.333..., 0.333...])
    """

    OWNER, VERSION = "prioritized sampler", 1
    STATE = {
        "alpha": Attribute(number(0), "table.alpha"),
        "beta": Attribute(number(0), "_beta"),
        "eps": Attribute(attribute="table.eps"),
        "capacity": Attribute(attribute="table.capacity", argument="max_capacity"),
        "leaves": Attribute(check_for=lambda each: tensor(each.dtype, None, anywhere=True), attribute="table.leaves"),
        "priorities": Attribute(any_value, "table.saved_priorities"),
        "generations": Attribute(any_value, "table.saved_generations"),
        "largest": Attribute(number(0), "table.largest"),
        "starts": Attribute(
            check_for=lambda sampler: sampler._read_starts,
            attribute="table.starts",
            to_saved=ValidStarts.state,
            exists_if="supports_windows",
        ),
        "generator": GENERATOR,
    }
    supports_uneven_rings = True
    reduction = Checked(lambda value, name: one_of(value, name, REDUCTIONS))
    weight_norm = Checked("_check_norm")
    stratified = Checked(boolean)
    initial_priority = Checked(non_negative)
    batch_length = Checked("_check_window")
    num_earliest_frames_ignored = Checked("_check_window")
    priority_key = Checked(lambda value, name: nested_key(value))

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-8,
        dtype: torch.dtype | str = torch.float64,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
        *,
        priority_key: NestedKey = "td_error",
        stratified: bool = True,
        weight_norm: str | None = "batch",
        initial_priority: float = 1.0,
        batch_length: int | None = None,
        num_earliest_frames_ignored: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        # TorchRL's own __init__ would build compiled trees, which some versions of torch cannot load.
        eps, self.initial_priority = non_negative(eps, "eps"), initial_priority
        self._beta = non_negative(beta, "beta")
        self.supports_windows = True
        """Whether the sampler supports windows, even if the current ``batch_length`` is None."""
        self.batch_length = batch_length
        self.num_earliest_frames_ignored = num_earliest_frames_ignored
        self.supports_windows = self.batch_length is not None or self.num_earliest_frames_ignored > 0
        self._has_lowest = weight_norm == "buffer"
        self._make_table = partial(
            Priorities,
            alpha=non_negative(alpha, "alpha"),
            eps=eps,
            dtype=dtype,
            device="cpu" if device is None else device,
            keep_lowest=self._has_lowest,
            keep_highest=max_priority_within_buffer,
            limited=self.supports_windows,
        )
        if max_capacity is not None:
            self.table = self._make_table(max_capacity)
        self.reduction = reduction
        self.priority_key = priority_key
        self.stratified = stratified
        self.weight_norm = weight_norm
        self._generator = generator
        self._limited_by: tuple[int, ...] = ()  # ring version and lengths of the last call of table.limit

    @cached_property
    def table(self) -> Priorities:
        """The priorities of the cells and the tree for sampling."""
        raise ValueError(
            "max_capacity must be set for a PrioritizedSampler outside of an ExperienceBuffer. Pass max_capacity=N, "
            "the max_size of its storage, or pass both to an ExperienceBuffer."
        )

    def init_table(self, max_capacity: int) -> None:
        """Allocate the priorities of ``max_capacity`` cells, unless the sampler already has priorities."""
        if "table" not in vars(self):
            self.table = self._make_table(max_capacity)

    @property
    def max_size(self) -> int:
        """Number of cells with a priority."""
        return self.table.capacity

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of priorities and trees."""
        return self.table.tree.dtype

    @property
    def device(self) -> torch.device:
        """Device of the trees."""
        return self.table.priorities.device

    @property
    def eps(self) -> float:
        """Constant added to every priority."""
        return self.table.eps

    @property
    def alpha(self) -> float:
        """Exponent of the priorities; setting it recomputes all leaves from the stored priorities."""
        return self.table.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.table.change_alpha(non_negative(value, "alpha"), self.default_priority)

    @property
    def beta(self) -> float:
        """Exponent of the importance weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = non_negative(value, "beta")

    def _check_norm(self, value: Any, name: str) -> str | None:
        norm: str | None = one_of(value, name, WEIGHT_NORMS)
        if norm == "buffer" and not self._has_lowest:
            raise ValueError(f"{name} must be set to 'buffer' by the constructor, not later. Build another sampler.")
        return norm

    def _check_window(self, value: Any, name: str) -> int | None:
        number: int | None = optional(integer)(value, name) if name == "batch_length" else integer(value, name, 0)
        if number and not self.supports_windows:
            raise ValueError(
                f"{name} must be set by the constructor, because this sampler draws single cells, got {number}. "
                f"Build another one with {name}={number}."
            )
        return number

    @property
    def default_priority(self) -> float:
        """Priority of new data."""
        return float(max(self.initial_priority, self.table.maximum))

    def sample(
        self,
        storage: Storage,
        batch_size: int,
        batch_length: int | Literal["own"] | None = "own",
    ) -> tuple[Any, dict[str, Any]]:
        """Sample cells, as :meth:`UniformSampler.sample` does, or windows.

        Args:
            storage: the storage of the cells.
            batch_size: number of cells or windows.
            batch_length: steps of each window, by default the sampler's ``batch_length``; None for single cells.

        Returns:
            Cells ``[B]`` (coordinates for a storage with several dimensions), and a dict with ``priority_weight``
            (float32) and ``write_generation`` of each cell. Windows have the shape ``[B, T]``, and the dict also has
            ``importance_weights`` (float32).

        Raises:
            MissingStepsError: the storage is empty, no window fits, or all priorities are zero. The error is also a
                ValueError, RuntimeError and AssertionError.
            ValueError: the storage is larger than ``max_capacity``, ``batch_size`` is not a non-negative integer, or
                windows are sampled from a storage without a :class:`RingWriter`.
        """
        batch_size = integer(batch_size, "batch_size", 0)
        steps = self.batch_length if batch_length == "own" else batch_length
        if steps is not None and not self.supports_windows:
            raise ValueError(f"This sampler draws single cells. Build it with batch_length={steps!r} for windows.")
        table, windows = self.table, None
        if not table.count:
            self._add_stored_cells(storage)
        if not table.count:
            raise MissingStepsError(f"Cannot sample {batch_size} cells: 0 are stored. Extend the buffer first.")
        if table.starts is not None:
            rings = self._limit(storage, steps)
            if steps is not None:
                windows = steps, rings.num_envs, rings.length * rings.num_envs
        if not table.tree.nnz:
            raise MissingStepsError(
                f"All {table.count} stored priorities are zero, so nothing can be drawn. Set a positive priority, or "
                "build the sampler with eps > 0."
            )
        drawn = table.draw(self.draw(batch_size), self.stratified, self._beta, self._weight_divisor(steps), windows)
        index, info = drawn[0], {"priority_weight": drawn[1], "write_generation": drawn[2]}
        if windows is not None:
            info["importance_weights"] = drawn[3]
        return (index if storage.ndim == 1 else torch.unravel_index(index, storage.shape)), info

    def draw(self, count: int) -> NDArray[Any] | Tensor:
        """Draw random numbers in [0, 1), ``[count]``; override this method to control the samples completely.

        With ``stratified``, the ``i``-th number selects a cell in the ``i``-th part of the total priority.

        Returns:
            An array of the sampler's dtype; a tensor if the priorities are not on the CPU.
        """
        return self.table.uniform(count, self.generator)

    def _limit(self, storage: Storage, batch_length: int | None) -> Rings:
        """Limit sampling to cells that begin a complete window and are not ignored; return the rings."""
        rings = rings_of(storage)
        if rings is None:
            raise ValueError(
                f"batch_length and num_earliest_frames_ignored need rings, but no RingWriter fills this "
                f"{type(storage).__name__}. Build the buffer with writer=RingWriter(num_envs=...), or the sampler "
                "without these arguments."
            )
        reach, ignored = integer(batch_length or 1, "batch_length") - 1, self.num_earliest_frames_ignored
        limits = rings.version, reach, ignored
        if self._limited_by == limits:
            return rings
        positions, valid_from = rings.arrays
        begin = np.maximum(positions - rings.length, valid_from) + ignored
        end = np.maximum(positions - reach, begin)
        if not (end > begin).any():
            raise MissingStepsError(
                f"No window fits: the fullest ring has {int(rings.filled.max())} steps, a window needs "
                f"{reach + 1 + ignored} (batch_length={batch_length}, num_earliest_frames_ignored={ignored}). "
                "Collect more steps, or lower batch_length."
            )
        self.table.limit(begin, end, rings.length)
        self._limited_by = limits
        return rings

    def _weight_divisor(self, batch_length: int | None) -> float:
        """Return the divisor in the weights ``(leaf / divisor) ** -beta``; zero selects the batch's smallest leaf."""
        table = self.table
        if self.weight_norm is None:
            return table.total / ((table.count if batch_length is None else table.tree.nnz) or 1)
        # A cell with priority and eps zero is never drawn, and must not make all weights zero.
        return 0.0 if table.lowest is None else float(table.power(table.lowest.summary()))

    def update_priority(
        self,
        index: int | Tensor | tuple[Tensor, ...],
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
        generation: Tensor | None = None,
    ) -> None:
        """Set the priorities of cells; if a cell occurs twice, the last priority counts.

        Empty cells are skipped. Cells that were overwritten since they had the given ``generation`` are also skipped.

        Args:
            index: cells of any shape; coordinates ``[B, ndim]`` for a storage with several dimensions; -1 is skipped.
                With ``batch_length``: windows ``[B, T]``, or their first cells ``[B]``.
            priority: one number for all, one for each cell or window, or a tensor with further dimensions, e.g.
                ``[B, C]`` for several critics. ``reduction`` then computes one priority per cell or window.
            storage: required for a storage with several dimensions.
            generation: the batch's ``write_generation``.

        Raises:
            IndexError: a cell is out of range.
            TypeError: the cells are not integers.
            ValueError: a priority is negative, NaN or infinite, or shapes do not match.
        """
        if storage is not None and not self.table.count:
            self._add_stored_cells(storage)
        if self.supports_windows and isinstance(index, Tensor) and index.ndim == 2:
            index, generation = index[:, 0], generation if generation is None else generation[:, 0]
        cells, value = self._flat_priorities(index, priority, storage)
        if generation is not None:
            if generation.dtype != torch.int32 or generation.ndim != 1 or generation.device != cells.device:
                generation = generation.to(device=self.device, dtype=torch.int32).reshape(-1)
            if generation.numel() != cells.numel():
                raise ValueError(
                    f"generation must have {cells.numel()} numbers, one per cell, got {generation.numel()}. Pass the "
                    "write_generation of the batch."
                )
        self.table.write(cells, value, generation)

    def _flat_priorities(self, index: Any, priority: float | Tensor, storage: Storage | None) -> tuple[Tensor, Tensor]:
        cells = self._flat_cells(index, storage)
        if (
            isinstance(priority, Tensor)
            and priority.shape == cells.shape
            and priority.dtype in FLOATS
            and priority.device == cells.device
        ):
            return cells, priority.detach()
        value, count = torch.as_tensor(priority, device=self.device).detach(), cells.numel()
        if value.numel() == 1:
            value = value.reshape(1).expand(count)
        elif value.numel() != count:
            shape = tuple(getattr(index, "shape", ()))
            has_shape = bool(shape) and value.shape[: len(shape)] == shape and math.prod(shape) == count
            if not count or not value.numel() or not (has_shape or value.shape[0] == count):
                raise ValueError(
                    f"priority must be one number, or [{count}] with any further dimensions, for {count} cells, got "
                    f"shape {list(value.shape)}."
                )
            value = reduce_priorities(value, count, self.reduction)
        return cells, value.to(self.dtype).reshape(-1)

    def check_write(self, storage: Storage, rows: int, priority: Tensor | None) -> None:
        """Validate the priorities of new rows before anything changes, so that the write cannot fail half-way.

        Args:
            storage: the storage to write to.
            rows: number of rows.
            priority: priorities of the rows; None for the priority of new data.

        Raises:
            ValueError: the storage is larger than ``max_capacity``, a priority is negative, NaN or infinite, or the
                number of priorities differs from the number of rows.
        """
        self.check_capacity(storage.max_size)
        if priority is not None:
            self.table.check(self._flat_priorities(torch.arange(rows), priority, None)[1])

    def mark_update(self, index: int | slice | range | Tensor, *, storage: Storage | None = None) -> None:
        """Give newly written cells the priority of new data; the storage calls this.

        Raises:
            ValueError: the storage is larger than ``max_capacity``.
        """
        if storage is not None:
            self.check_capacity(storage.max_size)
        if isinstance(index, slice):
            index = range(*index.indices(self.max_size))
        if isinstance(index, range):
            index = torch.arange(index.start, index.stop, index.step)
        self.table.write(self._flat_cells(index, storage), self.default_priority)

    def invalidate(self, index: Tensor) -> None:
        """Exclude removed cells, ``[n]``, from sampling until they are written again."""
        self.table.remove(index.to(self.device))

    def extend(self, index: Any) -> None:
        """Do nothing, because :meth:`mark_update` has already been called."""

    add = extend

    def _flat_cells(self, index: Any, storage: Storage | None) -> Tensor:
        if isinstance(index, Tensor) and index.ndim == 1 and index.dtype == torch.int64 and index.device == self.device:
            return index
        if isinstance(index, tuple):
            index = torch.stack(index, -1)
        cells = as_integers(index, "Cells").to(self.device)
        if storage is not None and storage.ndim > 1 and cells.ndim > 1:
            flat = cells[..., 0]
            for axis, size in enumerate(storage.shape[1:], start=1):
                flat = flat * size + cells[..., axis]
            cells = flat
        return cells.reshape(-1)

    def _add_stored_cells(self, storage: Storage) -> None:
        # If the storage was filled before it got this sampler, mark_update was never called for its cells.
        if len(storage):
            self.check_capacity(storage.max_size)
            self.table.write(stored_cells(storage).to(self.device), self.default_priority)

    def check_capacity(self, size: int) -> None:
        """Validate that the table has room for the priorities of ``size`` cells; raise ValueError if not."""
        if size > self.table.capacity:
            raise ValueError(
                f"max_capacity must be at least {size}, the cells of the storage, got {self.max_size}. "
                f"Build the sampler with max_capacity={size}."
            )

    def clear(self) -> None:
        """Remove all priorities; ``ReplayBuffer.empty`` calls this."""
        if "table" in vars(self):
            self.table.clear()
        self._limited_by = ()

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        prefix, count = f"The {self.OWNER} state is foreign", len(values["leaves"])
        if count > self.max_size:
            raise ValueError(f"{prefix}: it has {count} leaves, expected at most {self.max_size}.")
        for name, dtype in (("priorities", self.dtype), ("generations", torch.int32)):
            tensor(dtype, count, anywhere=True)(values[name], repr(name))
        priorities, leaves, alpha, eps = (values[name] for name in ("priorities", "leaves", "alpha", "eps"))
        if not self.table.is_consistent(priorities, leaves, alpha, eps, values.get("starts")):
            raise ValueError(
                f"{prefix}: its priorities must be finite and not negative, -1 for empty cells, and its leaves must "
                "be (priority + eps) ** alpha."
            )

    def _read_starts(self, value: Any, name: str) -> ValidStarts:
        """Validate the saved start positions of each environment, and return them as :class:`ValidStarts`."""
        numbers = tensor(torch.int64, None, low=0)

        def check_end(starts: dict[str, Any]) -> None:
            begin, length = starts["begin"], starts["length"]
            tensor(torch.int64, len(begin), low=begin, high=begin + length)(starts["end"], "'end'")

        schema = {"begin": numbers, "length": bounded_integer(1, self.max_size), "end": any_value}
        begin, length, end = check_state(value, schema, "starts", together=check_end).values()
        if len(begin) * length > self.max_size:
            raise state_error(value, name, f"at most {self.max_size} cells in all rings")
        return ValidStarts(begin.numpy().copy(), end.numpy().copy(), length)

    def _post_load(self) -> None:
        self.table.rebuild()
        self._limited_by = ()

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}(max_capacity={self.max_size}, alpha={self.alpha}, beta={self.beta}, eps={self.eps})"
