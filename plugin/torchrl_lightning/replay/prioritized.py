"""Prioritized experience replay without compiled TorchRL symbols."""

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

from torchrl_lightning._compat import SamplerHooks
from torchrl_lightning.entries import nested_key
from torchrl_lightning.kernels.indices import integers
from torchrl_lightning.ranges import Checked, boolean, integer, not_negative, one_of, optional
from torchrl_lightning.replay.priorities import REDUCTIONS, Priorities, Starts, reduce_priorities
from torchrl_lightning.replay.rings import Rings, rings_in, stored_cells
from torchrl_lightning.replay.steps import StepsMissing
from torchrl_lightning.state import GENERATOR, Attribute, Stated, anything, check_state, number, tensor, whole, wrong

WEIGHT_NORMS = ("batch", "buffer", None)
FLOATS = (torch.float32, torch.float64)


class PrioritizedSampler(Stated, SamplerHooks, _PrioritizedSampler):
    """Draw cell ``i`` with probability ``P(i) = (p_i + eps)^alpha / sum_j (p_j + eps)^alpha``.

    Importance weights are ``w_i = (N P(i))^-beta``, divided by the largest of the batch or of the buffer. New data get
    the highest priority so far, ``initial_priority`` at least. Samples and updates cost ``O(batch * log capacity)``,
    setting ``alpha`` costs ``O(capacity)``, setting ``beta`` nothing; TorchRL's schedulers set both. Cells that hold
    nothing are never drawn.

    A batch carries ``priority_weight`` and ``write_generation``, both ``[B]``. Passed back to
    :meth:`update_priority`, the latter lets it ignore updates of cells that were overwritten in between.

    With ``batch_length`` cells are where windows begin, and batches ``[B, T]``: so many successive steps of one
    environment, all of them stored, which may go on in the next episode. Every step counts, so there is no ``mask``, as
    there is in batches of a :class:`SequenceSampler`. The priorities are those of windows by their
    first step; what keeps a window from being drawn (its end is not stored yet, say) does not change them. ``N`` counts
    the windows that can be drawn. Beside the other entries, which are expanded to ``[B, T]``, stands
    ``importance_weights``: the powers of priorities over the mean of those that are not zero, so that
    ``priority_weight`` with ``weight_norm=None`` is ``importance_weights ** -beta``.

    Schaul, Quan, Antonoglou, Silver: Prioritized Experience Replay. https://arxiv.org/abs/1511.05952

    Args:
        max_capacity: the ``max_size`` of the storage, which an :class:`ExperienceBuffer` hands over where it is None.
        alpha: exponent of the priorities, not negative; 0 draws uniformly.
        beta: exponent of the importance weights, not negative; 1 corrects the bias in full.
        eps: added to every priority.
        dtype: of priorities and trees, or its name.
        reduction: how priorities with further dimensions become one for each cell: max, min, mean or median.
        max_priority_within_buffer: new data get the highest priority that is still stored, not the highest ever given.
        device: where the trees live, the CPU by default.
        priority_key: where a loss writes the new priorities; kept for readers of the sampler.
        stratified: one draw from each of ``B`` equal shares of the total priority; otherwise independent draws.
        weight_norm: ``"batch"`` or ``"buffer"``: the largest weight there is 1; None leaves the weights as they are.
        initial_priority: least priority of new data.
        batch_length: steps of a window; None for single cells, ``[B]``. A sampler that is built with None draws nothing
            else.
        num_earliest_frames_ignored: nothing is drawn that begins in the oldest so many stored steps of an environment.
        generator: random generator; the buffer's takes its place.

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
        "eps": Attribute(at="table.eps"),
        "capacity": Attribute(at="table.capacity", argument="max_capacity"),
        "leaves": Attribute(of=lambda own: tensor(own.dtype, None, anywhere=True), at="table.leaves"),
        "priorities": Attribute(anything, "table.held"),
        "generations": Attribute(anything, "table.writes"),
        "largest": Attribute(number(0), "table.largest"),
        "starts": Attribute(
            of=lambda sampler: sampler._read_starts, at="table.starts", form=Starts.state, only="knows_windows"
        ),
        "generator": GENERATOR,
    }
    reads_rings = True
    reduction = Checked(lambda value, name: one_of(value, name, REDUCTIONS))
    weight_norm = Checked("_check_norm")
    stratified = Checked(boolean)
    initial_priority = Checked(not_negative)
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
        # TorchRL's own __init__ would build its compiled trees, which do not load with every torch.
        eps, self.initial_priority = not_negative(eps, "eps"), initial_priority
        self._beta = not_negative(beta, "beta")
        self.knows_windows = True
        """Whether it can draw windows, however long those are that it draws now."""
        self.batch_length = batch_length
        self.num_earliest_frames_ignored = num_earliest_frames_ignored
        self.knows_windows = self.batch_length is not None or self.num_earliest_frames_ignored > 0
        self._has_lowest = weight_norm == "buffer"
        self.make_table = partial(
            Priorities,
            alpha=not_negative(alpha, "alpha"),
            eps=eps,
            dtype=dtype,
            device="cpu" if device is None else device,
            keep_lowest=self._has_lowest,
            keep_highest=max_priority_within_buffer,
            limited=self.knows_windows,
        )
        if max_capacity is not None:
            self.table = self.make_table(max_capacity)
        self.reduction = reduction
        self.priority_key = priority_key
        self.stratified = stratified
        self.weight_norm = weight_norm
        self._own_rng = generator
        self._limited_by: tuple[int, ...] = ()  # version of the rings and lengths that decide which cells are drawn

    @cached_property
    def table(self) -> Priorities:
        """Priorities of the cells, and the tree from which they are drawn."""
        raise ValueError(
            "This PrioritizedSampler does not know for how many cells it keeps priorities; give max_capacity=N, the "
            "max_size of its storage, or make an ExperienceBuffer of both."
        )

    @property
    def max_size(self) -> int:
        """Number of cells that priorities are kept for."""
        return self.table.capacity

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of priorities and trees."""
        return self.table.tree.dtype

    @property
    def device(self) -> torch.device:
        """Where the trees live."""
        return self.table.priorities.device

    @property
    def eps(self) -> float:
        """What is added to every priority."""
        return self.table.eps

    @property
    def alpha(self) -> float:
        """Exponent of the priorities; setting it recomputes all leaves from the stored priorities."""
        return self.table.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.table.change_alpha(not_negative(value, "alpha"), self.default_priority)

    @property
    def beta(self) -> float:
        """Exponent of the importance weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = not_negative(value, "beta")

    def _check_norm(self, value: Any, name: str) -> str | None:
        norm: str | None = one_of(value, name, WEIGHT_NORMS)
        if norm == "buffer" and not self._has_lowest:
            raise ValueError(f"{name} must be given to the constructor to be 'buffer'. Build another sampler.")
        return norm

    def _check_window(self, value: Any, name: str) -> int | None:
        number: int | None = optional(integer)(value, name) if name == "batch_length" else integer(value, name, 0)
        if number and not self.knows_windows:
            raise ValueError(
                f"{name} must be given to the constructor, because this sampler draws single cells, got {number}. "
                f"Build another one with {name}={number}."
            )
        return number

    @property
    def default_priority(self) -> float:
        """Priority of new data."""
        return float(max(self.initial_priority, self.table.maximum))

    def sample(
        self, storage: Storage, batch_size: int, batch_length: int | Literal["own"] | None = "own"
    ) -> tuple[Any, dict[str, Any]]:
        """Draw cells, as :meth:`UniformSampler.sample` does, or windows.

        Args:
            storage: what the cells are in.
            batch_size: how many cells, or windows.
            batch_length: steps of each window, if not as built; None for single cells.

        Returns:
            Cells ``[B]`` (coordinates for a storage of several dimensions), and ``priority_weight`` (float32) and
            ``write_generation`` of each; of windows ``[B, T]``, and ``importance_weights`` (float32), too.

        Raises:
            StepsMissing: a ValueError, RuntimeError and AssertionError: nothing is stored, there is no room for a
                window, or all priorities are zero.
            ValueError: the storage is larger than ``max_capacity``, ``batch_size`` is not a size, or no
                :class:`RingWriter` tells where steps are.
        """
        batch_size = integer(batch_size, "batch_size", 0)
        steps = self.batch_length if batch_length == "own" else batch_length
        if steps is not None and not self.knows_windows:
            raise ValueError(f"This sampler draws single cells; build it with batch_length={steps!r}.")
        table, windows = self.table, None
        if not table.count:
            self._adopt(storage)
        if not table.count:
            raise StepsMissing(f"Cannot sample {batch_size} cells: 0 are stored. Extend the buffer first.")
        if table.starts is not None:
            rings = self._limit(storage, steps)
            if steps is not None:
                windows = steps, rings.num_envs, rings.length * rings.num_envs
        if not table.tree.nnz:
            raise StepsMissing(
                f"All {table.count} stored priorities are zero, so that nothing can be drawn; "
                "give a positive priority, or eps > 0."
            )
        found = table.draw(self.draw(batch_size), self.stratified, self._beta, self._base(steps), windows)
        index, info = found[0], {"priority_weight": found[1], "write_generation": found[2]}
        if windows is not None:
            info["importance_weights"] = found[3]
        return (index if storage.ndim == 1 else torch.unravel_index(index, storage.shape)), info

    def draw(self, count: int) -> NDArray[Any] | Tensor:
        """Draw numbers in [0, 1), ``[count]``: all the randomness there is; override it to decide what is drawn.

        With ``stratified``, number ``i`` falls into share ``i`` of the total priority.

        Returns:
            An array of the sampler's dtype; a tensor where priorities do not lie on the CPU.
        """
        return self.table.uniform(count, self.generator)

    def _limit(self, storage: Storage, batch_length: int | None) -> Rings:
        """Let only those cells be drawn from which a whole window is stored, and which are not ignored."""
        rings = rings_in(storage)
        if rings is None:
            raise ValueError(
                f"batch_length and num_earliest_frames_ignored need rings, but no RingWriter fills this "
                f"{type(storage).__name__}; build the buffer with writer=RingWriter(num_envs=...), or the sampler "
                "without them."
            )
        reach, ignored = integer(batch_length or 1, "batch_length") - 1, self.num_earliest_frames_ignored
        source = rings.version, reach, ignored
        if self._limited_by == source:
            return rings
        positions, floor = rings.arrays
        begin = np.maximum(positions - rings.length, floor) + ignored
        end = np.maximum(positions - reach, begin)
        if not (end > begin).any():
            raise StepsMissing(
                f"There is no room for a window: the fullest ring holds {int(rings.filled.max())} steps, windows need "
                f"{reach + 1 + ignored} (batch_length={batch_length}, num_earliest_frames_ignored={ignored}). "
                "Collect more, or take shorter ones."
            )
        self.table.limit(begin, end, rings.length)
        self._limited_by = source
        return rings

    def _base(self, batch_length: int | None) -> float:
        """Return what the leaves are divided by in the weights; zero stands for the smallest leaf of the batch."""
        table = self.table
        if self.weight_norm is None:
            return table.total / ((table.count if batch_length is None else table.tree.nnz) or 1)
        # A stored cell that can never be drawn (priority and eps zero) must not make all weights zero.
        return 0.0 if table.lowest is None else float(table.power(table.lowest.summary()))

    def update_priority(
        self,
        index: int | Tensor | tuple[Tensor, ...],
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
        generation: Tensor | None = None,
    ) -> None:
        """Change the priorities of cells; where a cell comes twice, the last one stays.

        Cells that hold nothing are left alone, and so are those whose ``generation`` is another by now.

        Args:
            index: cells, any shape; coordinates ``[B, ndim]`` for a storage of several dimensions; -1 for nothing.
                With ``batch_length``, windows ``[B, T]``, or the cells ``[B]`` where they begin.
            priority: one for all; one for each cell or window; or of the shape of the cells with further dimensions,
                such as ``[B, C]`` of several critics, which ``reduction`` makes one for each cell or window.
            storage: needed where it has several dimensions.
            generation: the batch's ``write_generation``.

        Raises:
            IndexError: a cell out of range.
            TypeError: the cells are not integers.
            ValueError: a priority is negative, NaN or infinite, or shapes do not fit.
        """
        if storage is not None and not self.table.count:
            self._adopt(storage)
        if self.knows_windows and isinstance(index, Tensor) and index.ndim == 2:
            index, generation = index[:, 0], generation if generation is None else generation[:, 0]
        cells, value = self._flat(index, priority, storage)
        if generation is not None:
            if generation.dtype != torch.int32 or generation.ndim != 1 or generation.device != cells.device:
                generation = generation.to(device=self.device, dtype=torch.int32).reshape(-1)
            if generation.numel() != cells.numel():
                raise ValueError(
                    f"Got {generation.numel()} generations for {cells.numel()} cells; hand back the batch's own."
                )
        self.table.write(cells, value, generation)

    def _flat(self, index: Any, priority: float | Tensor, storage: Storage | None) -> tuple[Tensor, Tensor]:
        cells = self._cells(index, storage)
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
                    f"Got priorities of shape {list(value.shape)} for {count} cells; expected one number, or [{count}] "
                    "with any further dimensions."
                )
            value = reduce_priorities(value, count, self.reduction)
        return cells, value.to(self.dtype).reshape(-1)

    def check_write(self, storage: Storage, rows: int, priority: Tensor | None) -> None:
        """Check that a write which brings its priorities along will not fail half-way; nothing is changed.

        Args:
            storage: what is written to.
            rows: how many rows.
            priority: their priorities, or None where they get that of new data.

        Raises:
            ValueError: the storage is larger than ``max_capacity``, a priority is negative, NaN or infinite, or there
                is not one for each row.
        """
        self.check_capacity(storage.max_size)
        if priority is not None:
            self.table.check(self._flat(torch.arange(rows), priority, None)[1])

    def mark_update(self, index: int | slice | range | Tensor, *, storage: Storage | None = None) -> None:
        """Give cells that were just written the priority of new data; called by the storage.

        Raises:
            ValueError: the storage is larger than ``max_capacity``.
        """
        if storage is not None:
            self.check_capacity(storage.max_size)
        if isinstance(index, slice):
            index = range(*index.indices(self.max_size))
        if isinstance(index, range):
            index = torch.arange(index.start, index.stop, index.step)
        self.table.write(self._cells(index, storage), self.default_priority)

    def forget(self, index: Tensor) -> None:
        """Never draw cells again that hold nothing any more, ``[n]``, until they are written."""
        self.table.remove(index.to(self.device))

    def extend(self, index: Any) -> None:
        """Do nothing: :meth:`mark_update` was called before."""

    add = extend

    def _cells(self, index: Any, storage: Storage | None) -> Tensor:
        if isinstance(index, Tensor) and index.ndim == 1 and index.dtype == torch.int64 and index.device == self.device:
            return index
        if isinstance(index, tuple):
            index = torch.stack(index, -1)
        cells = integers(index, "Cells").to(self.device)
        if storage is not None and storage.ndim > 1 and cells.ndim > 1:
            flat = cells[..., 0]
            for axis, size in enumerate(storage.shape[1:], start=1):
                flat = flat * size + cells[..., axis]
            cells = flat
        return cells.reshape(-1)

    def _adopt(self, storage: Storage) -> None:
        # A storage that was filled before this sampler came to it never told it what was written.
        if len(storage):
            self.check_capacity(storage.max_size)
            self.table.write(stored_cells(storage).to(self.device), self.default_priority)

    def check_capacity(self, size: int) -> None:
        """Validate that there is a priority for each of ``size`` cells; raise ValueError if not."""
        if size > self.table.capacity:
            raise ValueError(
                f"The storage has {size} cells, this sampler keeps {self.max_size} priorities; "
                f"build it with max_capacity={size}."
            )

    def clear(self) -> None:
        """Forget all priorities; called by ``ReplayBuffer.empty``."""
        if "table" in vars(self):
            self.table.clear()
        self._limited_by = ()

    def _check_together(self, values: Mapping[str, Any]) -> None:
        foreign, held = f"The {self.OWNER} state is foreign", len(values["leaves"])
        if held > self.max_size:
            raise ValueError(f"{foreign}: it has {held} leaves, expected at most {self.max_size}.")
        for name, dtype in (("priorities", self.dtype), ("generations", torch.int32)):
            tensor(dtype, held, anywhere=True)(values[name], repr(name))
        priorities, leaves, alpha, eps = (values[name] for name in ("priorities", "leaves", "alpha", "eps"))
        if not self.table.could_hold(priorities, leaves, alpha, eps, values.get("starts")):
            raise ValueError(
                f"{foreign}: it holds priorities that are negative or not finite, of cells that hold nothing, or other "
                "leaves than (priority + eps) ** alpha."
            )

    def _read_starts(self, value: Any, name: str) -> Starts:
        """Return where a draw may begin: positions of each environment, in rings that all fit the priorities."""
        numbers = tensor(torch.int64, None, low=0)

        def check_end(starts: dict[str, Any]) -> None:
            begin, length = starts["begin"], starts["length"]
            tensor(torch.int64, len(begin), low=begin, high=begin + length)(starts["end"], "'end'")

        schema = {"begin": numbers, "length": whole(1, self.max_size), "end": anything}
        begin, length, end = check_state(value, schema, "starts", together=check_end).values()
        if len(begin) * length > self.max_size:
            raise wrong(value, name, f"at most {self.max_size} cells in all rings")
        return Starts(begin.numpy().copy(), end.numpy().copy(), length)

    def _loaded(self) -> None:
        self.table.rebuild()
        self._limited_by = ()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(max_capacity={self.max_size}, alpha={self.alpha}, beta={self.beta}, eps={self.eps})"
        )
