"""Windows drawn evenly over environments, a part of them among the newest steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning.kernels import windows
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.parts import check_generator, uniform
from torchrl_lightning.ranges import Checked, boolean, check_defaults, exact_ratio, fraction, integer
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.rings import NO_INDEX
from torchrl_lightning.replay.sequences import SequenceSampler
from torchrl_lightning.replay.steps import Ints, StepsMissing
from torchrl_lightning.replay.writer import RingWriter
from torchrl_lightning.state import Child


def check_sampling(
    sampler: Sampler | None, prioritized: bool, initial_priority: float, steps: int, ratio: float, replacement: bool
) -> None:
    """Validate arguments that describe how a buffer draws; raise ValueError if one of them has no effect.

    Args:
        sampler: The sampler that takes the place of the arguments below.
        prioritized: The argument ``prioritized_sampling``.
        initial_priority: Least priority of new steps.
        steps: The argument ``recent_data_steps``.
        ratio: The argument ``recent_data_ratio``.
        replacement: The argument ``with_replacement``.
    """
    newest = {"recent_data_steps": (steps, 1)}
    priority = {"initial_priority": (initial_priority, 1.0)}
    if sampler is not None:
        others = {"recent_data_ratio": (ratio, 0.0), "with_replacement": (replacement, False)}
        by_priority = {"prioritized_sampling": (prioritized, False), **priority}
        check_defaults("beside sampler=", "leave sampler out", **newest, **others, **by_priority)
        return
    if not prioritized:
        check_defaults("without prioritized_sampling=True", "give prioritized_sampling=True", **priority)
    if not ratio:
        check_defaults("without recent_data_ratio", "give recent_data_ratio", **newest)


class RecentSampler(SequenceSampler):
    """Draw windows of ``batch_length`` steps evenly over environments, part of them among the newest steps.

    Every environment that holds a whole window gives the same number of draws, or one more by chance, however many
    steps it holds; every beginning in it is equally likely. Windows may go on in the next episode, as with
    ``SequenceSampler(episode_ends="across")``; batches are ``[B, T]`` and hold what those of a :class:`SequenceSampler`
    hold.

    ``ceil(B * recent_data_ratio)`` windows begin among the last ``recent_data_steps`` beginnings of each environment,
    and come first in the batch. This is done only where environments have, on average, more than
    ``recent_data_steps / recent_data_ratio`` beginnings: in smaller buffers, even draws give as many of the newest.

    With ``prioritized`` that sampler draws the windows that are not recent, and batches hold the entries that it gives
    instead. Recent windows are not drawn by priority: their ``priority_weight`` and ``importance_weights`` are 1.

    Args:
        batch_length: steps of a window.
        recent_data_steps: among how many of the newest beginnings of each environment.
        recent_data_ratio: which share of a batch; 0 draws everything evenly.
        with_replacement: draw beginnings of an environment independently; otherwise one from each of as many equal
            stretches as it gives draws, so that one comes twice only where two stretches meet within a step.
        num_earliest_frames_ignored: no window begins in the oldest so many stored steps of an environment.
        prioritized: draws by priority what is not recent; built with a ``batch_length``, in place of which it is asked
            for this sampler's, and with the same ``num_earliest_frames_ignored``. A callable, such as the class or a
            partial of it, is called with both.
        generator: random generator; the buffer's takes its place.

    Raises:
        ValueError: an option out of range.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer, RingStorage
        >>> sampler = RecentSampler(batch_length=2, recent_data_steps=3, recent_data_ratio=0.25)
        >>> buffer = ExperienceBuffer(storage=RingStorage(100), sampler=sampler, num_envs=2, batch_size=8)
        >>> for step in range(50):
        ...     _ = buffer.extend(TensorDict({"step": torch.full((2,), step)}, [2]))
        >>> batch = buffer.sample()
        >>> batch.shape, bool((batch["step"][:2, 0] >= 46).all())
        (torch.Size([8, 2]), True)
    """

    OWNER = "recent sampler"
    STATE = {**SequenceSampler.STATE, "prioritized": Child()}
    recent_data_steps = Checked(integer)
    with_replacement = Checked(boolean)
    num_earliest_frames_ignored = Checked("_check_ignored")

    def __init__(
        self,
        batch_length: int = 1,
        *,
        recent_data_steps: int = 1,
        recent_data_ratio: float = 0.0,
        with_replacement: bool = False,
        num_earliest_frames_ignored: int = 0,
        prioritized: PrioritizedSampler | Callable[..., PrioritizedSampler] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if prioritized is not None and not isinstance(prioritized, PrioritizedSampler):
            prioritized = prioritized(
                batch_length=batch_length, num_earliest_frames_ignored=num_earliest_frames_ignored
            )
        self.prioritized = prioritized
        super().__init__(batch_length, episode_ends="across", generator=generator)
        if generator is not None:
            self.generator = generator
        self.recent_data_steps = recent_data_steps
        self.recent_data_ratio = recent_data_ratio
        self.with_replacement = with_replacement
        self.num_earliest_frames_ignored = num_earliest_frames_ignored

    def _check_ignored(self, value: Any, name: str) -> int:
        ignored = integer(value, name, 0)
        if (prioritized := self.prioritized) is not None:
            found = prioritized.batch_length, prioritized.num_earliest_frames_ignored
            if not prioritized.knows_windows or found[1] != ignored:
                raise ValueError(
                    f"The prioritized sampler must be built with a batch_length and {name}={ignored}, got {found[0]} "
                    f"and {found[1]}."
                )
        return ignored

    @property
    def recent_data_ratio(self) -> float:
        """Which share of a batch is drawn among the newest steps."""
        return self._recent_data_ratio

    @recent_data_ratio.setter
    def recent_data_ratio(self, ratio: float) -> None:
        self._recent_data_ratio = fraction(ratio, "recent_data_ratio")
        self._share = exact_ratio(self._recent_data_ratio).as_integer_ratio()

    @property
    def generator(self) -> torch.Generator:
        """The random generator, which is that of the prioritized sampler, too."""
        return super().generator if self.prioritized is None else self.prioritized.generator

    @generator.setter
    def generator(self, value: torch.Generator) -> None:
        self._own_rng = check_generator(value)
        if self.prioritized is not None:
            self.prioritized.generator = value

    def sample(
        self, storage: Storage, batch_size: int, batch_length: int | Literal["own"] | None = "own"
    ) -> tuple[Tensor, dict[Any, Any]]:
        """Draw windows, as :meth:`SequenceSampler.sample` does.

        Returns:
            Cells ``[B, T]``, and what a :class:`SequenceSampler` gives, or a :class:`PrioritizedSampler`.

        Raises:
            StepsMissing: a ValueError, RuntimeError and AssertionError: nothing is stored, no environment holds a whole
                window, or all priorities are zero.
            ValueError: no :class:`RingWriter` fills the storage.
        """
        if batch_length == "own":
            length: int = self.batch_length
            batch_length = length
        if self.prioritized is None:
            return super().sample(storage, batch_size, batch_length)
        batch_size, steps = integer(batch_size, "batch_size", 0), batch_length or 1
        recent = self._recent(self._writer(storage, batch_size, steps), batch_size, steps)
        index, info = self.prioritized.sample(storage, batch_size - recent, batch_length)
        if not recent:
            return index, info
        newest = super().sample(storage, recent, batch_length)[0].to(index.device)
        ones = torch.ones(newest.shape, dtype=torch.float32, device=index.device)
        first = newest if newest.ndim == 1 else newest[:, :1]
        beside = {"write_generation": self.prioritized.table.generations[first].expand(newest.shape)}
        return torch.cat([newest, index]), {key: torch.cat([beside.get(key, ones), info[key]]) for key in info}

    def draw(self, count: int) -> NDArray[np.float64]:
        """Draw numbers in [0, 1), ``[count]``: all the randomness there is; override it to decide what is drawn.

        It is asked for the windows drawn evenly, then for the recent ones: each time first for a number of every
        environment, if they cannot all give equally many (those with the smallest numbers give one more), then for one
        of every window.
        """
        return uniform(count, self.generator)

    def _fill(self, writer: RingWriter, cells: Ints, mask: NDArray[np.bool_]) -> None:
        recent = self._recent(writer, *cells.shape) if self.prioritized is None else len(cells)
        self._draw_evenly(writer, writer.length, cells[recent:], mask[recent:])
        self._draw_evenly(writer, self.recent_data_steps, cells[:recent], mask[:recent])

    def _recent(self, writer: RingWriter, count: int, steps: int) -> int:
        """Return how many of so many windows are to be drawn among the newest steps."""
        part, whole = self._share
        filled, envs = writer.filled, len(writer.filled)
        beginnings = int(filled.sum()) - (steps - 1 + self.num_earliest_frames_ignored) * envs
        enough = beginnings * part > self.recent_data_steps * envs * whole
        return -(-count * part // whole) if enough else 0

    def _draw_evenly(self, writer: RingWriter, newest: int, cells: Ints, mask: NDArray[np.bool_]) -> None:
        """Fill windows, ``[n, T]``, that begin among so many of the newest beginnings."""
        count, reach = cells.shape[0], cells.shape[1] - 1
        if not count:
            return
        (positions, _), oldest = writer.rings.arrays, writer.oldest.numpy() + self.num_earliest_frames_ignored
        room = np.clip(positions - reach - oldest, 0, newest)
        owners = np.flatnonzero(room)
        if not len(owners):
            raise StepsMissing(
                f"There is no room for a window: the fullest ring holds {int(writer.filled.max())} steps, windows need "
                f"{reach + 1 + self.num_earliest_frames_ignored} (batch_length={reach + 1}, "
                f"num_earliest_frames_ignored={self.num_earliest_frames_ignored}). Collect more, or take shorter ones."
            )
        each, rest = divmod(count, len(owners))
        more = owners[np.argsort(self.draw(len(owners)))[:rest]] if rest else owners[:0]
        env = np.concatenate([np.tile(owners, each), more])
        place = self.draw(count)
        if not self.with_replacement:
            place = (np.arange(count) // len(owners) + place) / np.bincount(env)[env]
        rank = np.minimum((place * room[env]).astype(np.int64), room[env] - 1)
        # Candidates are ranked by environment, then by age.
        ranks = (room.cumsum() - room)[env] + rank
        rings = writer.length, positions, positions - reach - room
        jitted(windows.draw)(ranks.astype(np.float64), False, rings, NO_INDEX, (reach, 0, False, False), cells, mask, 0)

    def update_priority(
        self,
        index: int | Tensor | tuple[Tensor, ...],
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
        generation: Tensor | None = None,
    ) -> None:
        """Change priorities, as :meth:`PrioritizedSampler.update_priority` does; without that sampler, nothing."""
        if self.prioritized is not None:
            self.prioritized.update_priority(index, priority, storage=storage, generation=generation)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Give cells that were just written the priority of new data; called by the storage."""
        if self.prioritized is not None:
            self.prioritized.mark_update(index, storage=storage)

    def clear(self) -> None:
        """Forget what is known of the storage; called by ``ReplayBuffer.empty``."""
        super().clear()
        if self.prioritized is not None:
            self.prioritized.clear()

    def __repr__(self) -> str:
        options = f"recent_data_steps={self.recent_data_steps}, recent_data_ratio={self.recent_data_ratio}"
        return f"{type(self).__name__}({self.batch_length}, {options})"
