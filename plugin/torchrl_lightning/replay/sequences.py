"""Windows of successive steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._compat import OwnGenerator
from torchrl_lightning.entries import nested_keys, path_of
from torchrl_lightning.ranges import integer
from torchrl_lightning.replay.checks import check_flat_state
from torchrl_lightning.replay.flat_ring import FlatRing, WriteOrder
from torchrl_lightning.replay.rings import Ints
from torchrl_lightning.replay.sequence_reading import first_states
from torchrl_lightning.replay.sharing import is_spawning
from torchrl_lightning.replay.trajectories import TrajectoryList
from torchrl_lightning.replay.windows import (
    IndexedRings,
    Starts,
    WindowRule,
    all_starts,
    draw_steps,
    lay_out,
    longest_run,
)
from torchrl_lightning.replay.writer import writer_of
from torchrl_lightning.state import check_state, generator, mapping, optional, whole

STATE_VERSION = 1
EPISODE_ENDS = ("inside", "across", "pad")
OVER = ("steps", "trajectories")


class SequenceSampler(OwnGenerator, Sampler):
    """Draw windows of ``batch_length`` successive steps of one environment; batches are ``[B, T]``.

    ``batch_size`` counts windows. A batch holds ``index`` (cells) and ``mask``, both ``[B, T]``; ``mask`` marks the
    steps that count in a loss. Windows never mix environments, nor join the newest to the oldest steps.

    Over a :class:`RingWriter` episodes are known to its index; over another writer's flat storage they are followed as
    they are written, which takes a ``traj_key`` or a single environment. Nothing is searched: steps are drawn until
    enough of them can begin a window. Only where hardly one in ten thousand can, all are looked at, once per write.

    Args:
        batch_length: steps of a window.
        episode_ends: ``"inside"``: a window lies in one episode. ``"across"``: it may go on in the next one;
            ``is_init`` and the done flags in the data tell where. ``"pad"``: it begins at any step that leaves one to
            count, and where the episode ends first, repeats the last step, which ``mask`` leaves out.
        burn_in: the first so many steps of each window only warm up a recurrent state; ``mask`` leaves them out.
        over: ``"steps"``: every beginning is equally likely. ``"trajectories"``: every trajectory that has room for a
            window is equally likely, then every beginning in it (as TorchRL's ``SliceSampler``).
        recurrent_keys: recurrent states, of which only the first one of a window is read. It is expanded over the
            window, with zeros where an episode starts, as TorchRL's ``GRUModule`` and ``LSTMModule`` read it; so is the
            state under ``"next"``.
        traj_key: number of the trajectory, for flat storages that hold several environments.
        end_key: flag that ends an episode, for flat storages; a ``RingWriter`` has its own ``done_key``.
        generator: random generator; the buffer's takes its place.

    Raises:
        ValueError: an option out of range.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer, RingStorage
        >>> buffer = ExperienceBuffer(storage=RingStorage(100), sampler=SequenceSampler(4), batch_size=2)
        >>> done = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0], dtype=torch.bool).unsqueeze(-1)
        >>> _ = buffer.extend(TensorDict({"a": torch.arange(8), "next": {"done": done}}, [8]))
        >>> batch = buffer.sample()
        >>> batch.shape, batch.names, set(batch["a"][:, 0].tolist()) <= {0, 1}
        (torch.Size([2, 4]), [None, 'time'], True)
    """

    def __init__(
        self,
        batch_length: int,
        *,
        episode_ends: str = "inside",
        burn_in: int = 0,
        over: str = "steps",
        recurrent_keys: Sequence[NestedKey] = ("recurrent_state",),
        traj_key: NestedKey | None = None,
        end_key: NestedKey = ("next", "done"),
        generator: torch.Generator | None = None,
    ) -> None:
        for name, value, allowed in (("episode_ends", episode_ends, EPISODE_ENDS), ("over", over, OVER)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}.")
        batch_length = integer(batch_length, "batch_length")
        if isinstance(burn_in, bool) or not isinstance(burn_in, int) or not 0 <= burn_in < batch_length:
            raise ValueError(f"burn_in must lie in [0, batch_length), got {burn_in!r} of {batch_length} steps.")
        self.batch_length, self.episode_ends, self.burn_in, self.over = batch_length, episode_ends, burn_in, over
        self.recurrent_keys = [path_of(key) for key in nested_keys(recurrent_keys)]
        self.traj_key = None if traj_key is None else path_of(traj_key)
        self.end_key = path_of(end_key)
        self._own_rng = generator
        self._rule = WindowRule(batch_length, burn_in, episode_ends)
        self._steps: Ints = np.arange(batch_length)
        self.clear()

    def clear(self) -> None:
        """Forget what is known of the storage; called by ``ReplayBuffer.empty``."""
        self._trajectories = TrajectoryList()
        self._listed = -1  # how much was written when all beginnings had to be listed
        self._list: Starts | None = None
        self._on_rings = False
        self._order = WriteOrder()
        self._flat: FlatRing | None = None
        self._flat_state: Mapping[str, Any] | None = None

    def add(self, index: int | Tensor) -> None:
        """Record which cell was written."""
        if self._flat is not None:
            self._flat.note(index)
        elif not self._on_rings:
            self._order.note(index)

    def extend(self, index: Tensor) -> None:
        """Record which cells were written."""
        self.add(index)

    def __getstate__(self) -> dict[str, Any]:
        # Another process reads a flat storage for itself.
        return {**super().__getstate__(), **({"_flat": None} if is_spawning() else {})}

    # ------------------------------------------------------------------ drawing

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        """Draw windows.

        Args:
            storage: what the cells are in.
            batch_size: how many windows.

        Returns:
            Cells ``[B, T]``; ``mask`` ``[B, T]`` and the recurrent states.

        Raises:
            RuntimeError: nothing is stored.
            ValueError: windows are longer than any stored episode, or it is unknown where episodes end.
        """
        batch_size = integer(batch_size, "batch_size", 0)
        rings = self._rings(storage, batch_size)
        if not batch_size:
            nothing = torch.zeros((0, self.batch_length), dtype=torch.int64)
            return nothing, {"mask": nothing.bool()}
        if self.over == "steps":
            starts = self._draw(rings, batch_size)
        else:
            starts = self._trajectories.draw(rings, self._rule, batch_size, self._integers, self._uniform)
        if starts is None:
            raise self._too_long(rings)
        cells, mask = lay_out(rings, self._rule, starts, self._steps)
        index = torch.from_numpy(cells)
        info: dict[Any, Any] = {"mask": torch.from_numpy(np.ones(cells.shape, np.bool_) if mask is None else mask)}
        info.update(first_states(storage, index, self.recurrent_keys, self.episode_ends == "across"))
        return index, info

    def _draw(self, rings: IndexedRings, count: int) -> Starts | None:
        if self._listed < 0 or self._listed != int(rings.positions.sum()):
            starts = draw_steps(rings, self._rule, count, self._integers)
            if starts is not None:
                return starts
            self._listed, self._list = int(rings.positions.sum()), None
        if self._list is None:
            self._list = all_starts(rings, self._rule)
        env, start, end = self._list
        if not len(env):
            self._listed, self._list = -1, None
            return None
        choice = self._integers(len(env), count)
        return env[choice], start[choice], end[choice]

    def _rings(self, storage: Storage, count: int) -> IndexedRings:
        if not len(storage):
            raise RuntimeError(f"Cannot sample {count} windows of {self.batch_length} steps: 0 steps are stored.")
        if getattr(storage, "ndim", 1) != 1:
            raise ValueError(
                f"Sequences are read from one-dimensional storages, got ndim={storage.ndim}; for several environments "
                "use RingStorage and RingWriter(num_envs=...)."
            )
        writer = writer_of(storage)
        if writer is None:
            return self._follow(storage)
        if writer.index is None and (self._rule.by_episode or self.over == "trajectories"):
            raise ValueError(
                f"It is unknown where episodes end: the first data written had no entry {writer.done_key!r}. "
                'Store it, name another one by RingWriter(done_key=...), or take windows with episode_ends="across", '
                'over="steps".'
            )
        self._on_rings = True
        return writer

    def _follow(self, storage: Storage) -> FlatRing:
        if self._flat is None:
            self._order.check()
            self._flat = FlatRing(storage.max_size, self.end_key, self.traj_key)
            if self._flat_state is not None:
                self._flat.load_state_dict(self._flat_state)
                self._flat_state = None
        self._flat.follow(storage)
        return self._flat

    def _too_long(self, rings: IndexedRings) -> ValueError:
        longest = longest_run(rings, self._rule)
        what = "episode has" if self._rule.by_episode else "run of steps of one environment has"
        needed = self._rule.reach + 1
        return ValueError(
            f"There is no room for a window: the longest stored {what} {longest} steps, windows need {needed} "
            f"(batch_length={self.batch_length}, burn_in={self.burn_in}). Collect more, take shorter windows"
            + (', or pad them (episode_ends="pad").' if self.episode_ends == "inside" else ".")
        )

    def _integers(self, high: int, count: int) -> Ints:
        rng = self.generator
        return torch.randint(high, (count,), generator=rng, device=rng.device).cpu().numpy()

    def _uniform(self, _: int, count: int) -> Any:
        rng = self.generator
        return torch.rand(count, dtype=torch.float64, generator=rng, device=rng.device).cpu().numpy()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the storage, and the generator: tensors and scalars."""
        flat = self._flat.state_dict() if self._flat is not None else self._flat_state
        return {
            "schema_version": STATE_VERSION,
            "generator": self.generator.get_state().clone(),
            "listed": self._listed,
            "trajectories": self._trajectories.state_dict(),
            "flat": None if flat is None else dict(flat),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore exactly: with the storage restored too, the next sample is the one that would have come next.

        Raises:
            ValueError: another version, or a missing entry.
        """
        self.check_state(state_dict)
        self.clear()
        self.generator.set_state(state_dict["generator"].cpu())
        self._listed = int(state_dict["listed"])
        self._trajectories.load_state_dict(state_dict["trajectories"])
        self._flat_state = copy.deepcopy(state_dict["flat"])

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit; nothing is changed.

        Raises:
            ValueError: says what is wrong.
        """
        schema = {
            "generator": generator(self.generator.device),
            "listed": whole(-1),
            "trajectories": mapping,
            "flat": optional(mapping),
        }
        check_state(state_dict, schema, "sequence sampler", STATE_VERSION)
        self._trajectories.check_state(state_dict["trajectories"])
        if state_dict["flat"] is not None:
            check_flat_state(state_dict["flat"])

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.batch_length}, episode_ends={self.episode_ends!r}, burn_in={self.burn_in}, "
            f"over={self.over!r})"
        )
