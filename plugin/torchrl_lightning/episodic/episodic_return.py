"""Compute the discounted return of every stored step when its episode ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.torchrl_compat import entries_of, new_tensordict
from torchrl_lightning._core.tree import entry_of, path_of
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import check_defaults, fraction
from torchrl_lightning.episodic.time_steps import TRANSITIONS, StepLayout
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.kernels.n_step_returns import write_returns
from torchrl_lightning.kernels.scan import EXAMPLE_ARRAYS, discounted_scan
from torchrl_lightning.replay.episode_index import EpisodeIndex
from torchrl_lightning.replay.positions import Flags, Ints, steps_between
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.ring_writer import writer_of

_NO_CLIP = -math.inf, math.inf
DEFAULT_RETURN = -1000.0


def check_return_settings(record_episodic_return: bool, reward_clip: Any, default_return: float, critic: Any) -> None:
    """Validate the arguments for returns; raise ValueError if one is set although returns are not recorded."""
    if record_episodic_return:
        return
    check_defaults(
        "without record_episodic_return=True",
        "set record_episodic_return=True",
        reward_clip=(reward_clip, None),
        default_return=(default_return, DEFAULT_RETURN),
        critic=(critic, None),
    )


_NO_ARRAYS: tuple[Ints | None, tuple[Any, Any, Any] | None] = None, None


class EpisodicReturn(ConfigSafe):
    """Write the discounted returns of an episode into its stored steps when the episode ends.

    The return of a step is ``G[t] = r[t] + gamma * G[t+1]``. The sum stops at the end of the episode or at the first
    terminated step, which may end only a life. Steps of running episodes, and steps of
    a truncated episode after its last termination, keep ``default_return``. This number is so small that it does not
    matter as a lower bound of values. With a ``critic``, the returns of truncated episodes include the value of the
    last successor. If the first steps of an episode are overwritten, the remaining steps still get their returns.

    The returns are stored only in the entry ``key``. The cost is O(1) per step, because each episode is read once, when
    it ends. The storage calls this object on every write. Written rows must already have the entry; see
    :meth:`with_default`.

    Args:
        storage: storage of the rows, filled by a :class:`RingWriter` with ``track_episodes=True``.
        gamma: the discount; 0.99 if None.
        reward_clip: (lowest, highest) bounds for rewards in a return; stored rewards do not change.
        default_return: value stored for a step without a known return.
        critic: a TensorDictModule that writes ``state_value``, called on the last successors of truncated episodes.
        key: key of the stored returns, which have the shape of the reward.
        layout: keys of the row entries.

    Raises:
        ValueError: the storage has no writer with an episode index, or a number is out of range.

    Examples:
        >>> from torchrl_lightning.replay import ExperienceBuffer, RingWriter
        >>> writer = RingWriter(track_episodes=True)
        >>> buffer = ExperienceBuffer(storage=RingStorage(8), writer=writer)
        >>> returns = EpisodicReturn(buffer.storage, gamma=0.5)
        >>> end = torch.tensor([[0], [0], [1], [0]], dtype=torch.bool)
        >>> steps = TensorDict({"next": {"reward": torch.ones(4, 1), "done": end, "terminated": end}}, [4])
        >>> _ = buffer.extend(returns.with_default(steps))
        >>> buffer[:]["discounted_return"].flatten().tolist()
        [1.75, 1.5, 1.0, -1000.0]
    """

    def __init__(
        self,
        storage: RingStorage,
        *,
        gamma: float | None = None,
        reward_clip: Sequence[float] | None = None,
        default_return: float = DEFAULT_RETURN,
        critic: Callable[[TensorDictBase], TensorDictBase] | None = None,
        key: str = "discounted_return",
        layout: StepLayout = TRANSITIONS,
    ) -> None:
        writer = writer_of(storage)
        if writer is None or not writer.track_episodes:
            raise ValueError(
                "The storage must have a writer with an episode index, because returns are written when an episode "
                "ends. Use RingWriter(track_episodes=True), or build the buffer with keep_episodic_info=True."
            )
        gamma = fraction(0.99 if gamma is None else gamma, "gamma")
        self._gamma_and_clip: tuple[float, float, float] = gamma, *_NO_CLIP
        self.reward_clip = reward_clip
        self.default_return = default_return
        self.critic, self.key, self.layout = critic, key, layout
        self._paths = (key,), path_of(layout.reward), path_of(layout.terminated)
        self._storage, self._cached_arrays = storage, _NO_ARRAYS
        storage.attach(self)
        storage.watch(self, self._paths[1:])

    @property
    def default_return(self) -> float:
        """Value stored for a step without a known return."""
        return self._default_return

    @default_return.setter
    def default_return(self, value: float) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise ValueError(
                f"default_return must be a number, got {value!r}. Pass one below all returns, such as -inf."
            )
        self._default_return, self._default = number, torch.empty(0)  # cached entry for the next rows

    @property
    def gamma(self) -> float:
        """Discount; a new value applies to returns computed later."""
        return self._gamma_and_clip[0]

    @gamma.setter
    def gamma(self, value: float) -> None:
        self._gamma_and_clip = fraction(value, "gamma"), *self._gamma_and_clip[1:]

    @property
    def reward_clip(self) -> tuple[float, float] | None:
        """(lowest, highest) bounds for rewards in a return, or None."""
        return None if self._gamma_and_clip[1:] == _NO_CLIP else self._gamma_and_clip[1:]

    @reward_clip.setter
    def reward_clip(self, value: Sequence[float] | None) -> None:
        if value is not None and (len(value) != 2 or not value[0] <= value[1]):
            raise ValueError(f"reward_clip must be (lowest, highest) or None, got {value!r}.")
        clip = _NO_CLIP if value is None else (float(value[0]), float(value[1]))
        self._gamma_and_clip = self.gamma, *clip

    def with_default(self, data: TensorDictBase) -> TensorDict:
        """Return a shallow copy of the rows with the entry ``key``, which holds ``default_return``.

        Later calls with rows of this shape reuse the tensor of this entry, so copy it before you change it.

        Raises:
            KeyError: the rows have no reward or no termination flag.
            FlagsDifferError: the flags of a row differ, and ``done_reduce`` of the writer is None.
        """
        reward, terminated = entry_of(data, self.layout.reward), entry_of(data, self.layout.terminated)
        if reward is None or terminated is None:
            missing = self.layout.reward if reward is None else self.layout.terminated
            raise KeyError(
                f"The data must have the entry {missing!r} to compute returns. Nothing was written. Add the entry, or "
                "pass layout=StepLayout(...) with another key."
            )
        if terminated.numel() > data.numel():
            self._terminates(terminated)  # raises an error before the write if the flags of a row differ
        dtype = reward.dtype if reward.dtype.is_floating_point else torch.float32
        default = self._default
        if default.shape != reward.shape or default.dtype is not dtype or default.device != reward.device:
            default = torch.full_like(reward, self.default_return, dtype=dtype, requires_grad=False)
            self._default = default
        names = data.names if data.ndim > 1 else None
        return new_tensordict({**entries_of(data), self.key: default}, data.batch_size, names, data.device)

    def refresh(self, cells: Ints) -> None:
        """Recompute the returns of ``cells`` after flags or rewards in their episodes changed."""
        (path, leaf), *_ = self._storage.leaves(self.key)
        index = torch.from_numpy(cells)
        self._storage.write_entry(path, index, leaf.new_full((len(cells), *leaf.shape[1:]), self.default_return))
        self.mark_update(index)

    def mark_update(self, index: Tensor, **_: Any) -> None:
        """Write the returns of the episodes that end in these cells; the writer calls this method."""
        writer = writer_of(self._storage)
        assert writer is not None
        episodes = writer.index
        assert episodes is not None
        cells = (index if index.is_cpu else index.cpu()).numpy()
        arrays = self._kernel_arrays() if self.critic is None else None
        if arrays is None:
            last_cells = cells[episodes.arrays[1][cells]]
            if len(last_cells):
                self._write_episodes(episodes, np.unique(last_cells))
            return
        reward, terminated, returns = arrays
        time_steps = self.layout.time_steps
        if jitted(write_returns)(
            cells, episodes.rings, episodes.arrays, reward, terminated, time_steps, int(time_steps),
            self._gamma_and_clip, returns,
        ):  # fmt: skip
            self._storage.bump_revision()

    def _kernel_arrays(self) -> tuple[Any, Any, Any] | None:
        """Return rewards, termination flags and returns of all cells, or None if the kernel does not support them."""
        cells = self._storage.cells
        assert cells is not None
        table = cells.table
        if self._cached_arrays[0] is not table:  # the cells were allocated or moved
            returns, reward, terminated = (cells.leaves[cells.leaf_index[path]] for path in self._paths)
            arrays = None
            if (
                returns.is_cpu
                and returns.dtype in EXAMPLE_ARRAYS
                and reward.dtype == returns.dtype
                and terminated.numel() == len(terminated)
                and (terminated.dtype == torch.bool or terminated.dtype in EXAMPLE_ARRAYS)
            ):
                count = len(returns)
                arrays = reward.view(count, -1).numpy(), terminated.view(-1).numpy(), returns.view(count, -1).numpy()
            self._cached_arrays = table, arrays
        return self._cached_arrays[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached_arrays": _NO_ARRAYS}

    def _write_episodes(self, index: EpisodeIndex, last_cells: Ints) -> None:
        layout, storage = self.layout, self._storage
        env, end = index.steps_of(last_cells)
        # The reward of a time step belongs to the previous row.
        low = index.bounds(torch.from_numpy(env), torch.from_numpy(end))[0].numpy() + layout.time_steps
        nonempty = low <= end
        env, low, end, last_cells = env[nonempty], low[nonempty], end[nonempty], last_cells[nonempty]
        if not len(end):
            return
        episode, position, starts = steps_between(low, end)
        rows = index.cells_of(env[episode], position)
        reward = self._read(layout.reward, rows)
        (_, stored), *_ = storage.leaves(self.key)
        reward = reward.to(stored.dtype)
        if self.reward_clip is not None:
            reward = reward.clamp(*self.reward_clip)
        terminated = self._terminates(self._read(layout.terminated, rows))
        last_rows = starts + (end - low)  # the last row of each episode
        row = np.arange(len(rows))
        last_known = np.maximum.reduceat(np.where(terminated, row, -1), starts)  # last row with a known return
        truncated = ~terminated[last_rows]
        if self.critic is not None and truncated.any():
            value = self._values(self.critic, last_cells[truncated]).to(reward)
            truncated_rows = torch.from_numpy(last_rows[truncated]).to(reward.device)
            bootstrap = self.gamma * value.reshape(len(truncated_rows), *reward.shape[1:])
            reward = reward.index_add(0, truncated_rows, bootstrap)
            last_known[truncated] = last_rows[truncated]
        continues = ~terminated
        continues[last_rows] = False
        factor = torch.from_numpy(continues * self.gamma).to(reward).view(-1, *[1] * (reward.ndim - 1))
        returns = discounted_scan(reward, factor)
        known_rows = np.flatnonzero(row <= last_known[episode])
        cells = index.cells_of(env[episode[known_rows]], position[known_rows] - layout.time_steps)
        storage.write_entry(self.key, torch.from_numpy(cells), returns[torch.from_numpy(known_rows).to(returns.device)])

    def _terminates(self, flags: Tensor) -> Flags:
        """Return a mask of the terminated rows, ``[n]``."""
        writer = writer_of(self._storage)
        return self.layout.terminates(flags, None if writer is None else writer.done_reduce)

    def _read(self, key: NestedKey, rows: Ints) -> Tensor:
        (_, leaf), *_ = self._storage.leaves(key)
        return leaf.index_select(0, torch.from_numpy(rows).to(leaf.device))

    @torch.no_grad()
    def _values(self, critic: Callable[[TensorDictBase], TensorDictBase], cells: Ints) -> Tensor:
        last_steps = self._storage.get(torch.from_numpy(cells))
        value: Tensor = critic(last_steps if self.layout.time_steps else last_steps["next"])["state_value"]
        return value
