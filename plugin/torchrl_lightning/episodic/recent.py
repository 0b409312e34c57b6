"""Sample windows evenly across environments, with a fraction of the windows from the newest steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._core.mixins import check_generator, uniform
from torchrl_lightning._core.state import Child
from torchrl_lightning._core.validators import Checked, boolean, check_defaults, exact_ratio, fraction, integer
from torchrl_lightning.kernels import window_kernels
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.replay.positions import Ints, MissingStepsError
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.ring_writer import RingWriter
from torchrl_lightning.replay.rings import NO_INDEX
from torchrl_lightning.replay.sequences import SequenceSampler


def check_sampling(
    sampler: Sampler | None, prioritized: bool, initial_priority: float, steps: int, ratio: float, replacement: bool
) -> None:
    """Validate the sampling arguments of a buffer; raise ValueError if an argument has no effect.

    Args:
        sampler: The sampler that replaces the arguments below.
        prioritized: The argument ``prioritized_sampling``.
        initial_priority: Minimum priority of new steps.
        steps: The argument ``recent_data_steps``.
        ratio: The argument ``recent_data_ratio``.
        replacement: The argument ``with_replacement``.
    """
    newest = {"recent_data_steps": (steps, 1)}
    priority = {"initial_priority": (initial_priority, 1.0)}
    if sampler is not None:
        evenly = {"recent_data_ratio": (ratio, 0.0), "with_replacement": (replacement, False)}
        by_priority = {"prioritized_sampling": (prioritized, False), **priority}
        check_defaults("beside sampler=", "leave sampler out", **newest, **evenly, **by_priority)
        return
    if not prioritized:
        check_defaults("without prioritized_sampling=True", "set prioritized_sampling=True", **priority)
    if not ratio:
        check_defaults("without recent_data_ratio", "set recent_data_ratio", **newest)


class RecentSampler(SequenceSampler):
    """Draw windows of ``batch_length`` steps evenly across environments, and a fraction of them from the newest steps.

    Each environment with at least one complete window contributes the same number of windows, regardless of its number
    of steps. If the batch does not divide evenly, randomly chosen environments contribute one more window. All start
    positions of an environment are equally likely. Windows may continue in the next episode, as with
    ``SequenceSampler(episode_ends="across")``. Batches are ``[B, T]`` with the entries of a :class:`SequenceSampler`.

    The first ``ceil(B * recent_data_ratio)`` windows of a batch start at one of the last ``recent_data_steps`` start
    positions of an environment. This applies only if the environments have more than
    ``recent_data_steps / recent_data_ratio`` start positions on average. In smaller buffers, even sampling draws at
    least this fraction from the newest steps.

    If ``prioritized`` is given, it draws all windows that are not recent and defines the entries of a batch. Recent
    windows are not drawn by priority, so their ``priority_weight`` and ``importance_weights`` are 1.

    Args:
        batch_length: steps per window.
        recent_data_steps: number of newest start positions per environment that count as recent.
        recent_data_ratio: fraction of recent windows in a batch; 0 draws all windows evenly.
        with_replacement: draw start positions independently. If False, divide the start positions of an environment
            into one interval per draw, and draw one position from each interval. The intervals are equal, so a position
            repeats only at the border of two intervals.
        num_earliest_frames_ignored: number of oldest stored steps per environment at which no window starts.
        prioritized: sampler of the windows that are not recent. Its ``num_earliest_frames_ignored`` must be the same;
            this sampler sets its ``batch_length``. A callable, such as the class or a partial, gets both arguments.
        generator: random generator; the buffer's generator replaces it.

    Raises:
        ValueError: an option is out of range.

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
            other = prioritized.num_earliest_frames_ignored
            if not prioritized.supports_windows or other != ignored:
                raise ValueError(
                    f"prioritized must have a batch_length and {name}={ignored}, got "
                    f"batch_length={prioritized.batch_length} and {name}={other}."
                )
        return ignored

    @property
    def recent_data_ratio(self) -> float:
        """Fraction of a batch drawn from the newest steps."""
        return self._recent_data_ratio

    @recent_data_ratio.setter
    def recent_data_ratio(self, ratio: float) -> None:
        self._recent_data_ratio = fraction(ratio, "recent_data_ratio")
        self._exact_ratio = exact_ratio(self._recent_data_ratio).as_integer_ratio()

    @property
    def generator(self) -> torch.Generator:
        """The random generator, shared with the prioritized sampler."""
        return super().generator if self.prioritized is None else self.prioritized.generator

    @generator.setter
    def generator(self, value: torch.Generator) -> None:
        self._generator = check_generator(value)
        if self.prioritized is not None:
            self.prioritized.generator = value

    def sample(
        self,
        storage: Storage,
        batch_size: int,
        batch_length: int | Literal["own"] | None = "own",
    ) -> tuple[Tensor, dict[Any, Any]]:
        """Draw windows like :meth:`SequenceSampler.sample`.

        Returns:
            Cells ``[B, T]``, and the info of a :class:`SequenceSampler` or :class:`PrioritizedSampler`.

        Raises:
            MissingStepsError: the storage is empty, no environment holds a complete window, or all priorities are zero.
                This error is also a ValueError, a RuntimeError and an AssertionError.
            ValueError: the storage has no :class:`RingWriter`.
        """
        if batch_length == "own":
            length: int = self.batch_length
            batch_length = length
        if self.prioritized is None:
            return super().sample(storage, batch_size, batch_length)
        batch_size, steps = integer(batch_size, "batch_size", 0), batch_length or 1
        recent = self._count_recent(self._get_writer(storage, batch_size, steps), batch_size, steps)
        index, info = self.prioritized.sample(storage, batch_size - recent, batch_length)
        if not recent:
            return index, info
        newest = super().sample(storage, recent, batch_length)[0].to(index.device)
        ones = torch.ones(newest.shape, dtype=torch.float32, device=index.device)
        first = newest if newest.ndim == 1 else newest[:, :1]
        recent_info = {"write_generation": self.prioritized.table.generations[first].expand(newest.shape)}
        return torch.cat([newest, index]), {key: torch.cat([recent_info.get(key, ones), info[key]]) for key in info}

    def draw(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` random numbers in [0, 1); override this method to control the sampling.

        This method is the only source of randomness. The sampler draws the even windows first, and then the recent
        windows. If the windows of a group do not divide evenly, the first call draws one number per environment, and
        environments with the smallest numbers contribute one more window. The next call draws one number per window.
        """
        return uniform(count, self.generator)

    def _draw_windows(self, writer: RingWriter, cells: Ints, mask: NDArray[np.bool_]) -> None:
        recent = self._count_recent(writer, *cells.shape) if self.prioritized is None else len(cells)
        self._draw_evenly(writer, writer.length, cells[recent:], mask[recent:])
        self._draw_evenly(writer, self.recent_data_steps, cells[:recent], mask[:recent])

    def _count_recent(self, writer: RingWriter, count: int, steps: int) -> int:
        """Return the number of recent windows among ``count`` windows of ``steps`` steps."""
        numerator, denominator = self._exact_ratio
        filled, envs = writer.filled, len(writer.filled)
        num_starts = int(filled.sum()) - (steps - 1 + self.num_earliest_frames_ignored) * envs
        has_enough = num_starts * numerator > self.recent_data_steps * envs * denominator
        return -(-count * numerator // denominator) if has_enough else 0

    def _draw_evenly(self, writer: RingWriter, newest: int, cells: Ints, mask: NDArray[np.bool_]) -> None:
        """Fill ``cells`` ``[n, T]`` with windows from the last ``newest`` start positions of each environment."""
        count, steps_after_first = cells.shape[0], cells.shape[1] - 1
        if not count:
            return
        (positions, _), oldest = writer.rings.arrays, writer.oldest.numpy() + self.num_earliest_frames_ignored
        num_starts = np.clip(positions - steps_after_first - oldest, 0, newest)
        envs = np.flatnonzero(num_starts)
        if not len(envs):
            raise MissingStepsError(
                f"No environment holds a complete window: the fullest ring holds {int(writer.filled.max())} steps, a "
                f"window needs {steps_after_first + 1 + self.num_earliest_frames_ignored} "
                f"(batch_length={steps_after_first + 1}, "
                f"num_earliest_frames_ignored={self.num_earliest_frames_ignored}). Collect more steps, or lower "
                "batch_length."
            )
        per_env, remainder = divmod(count, len(envs))
        extra_envs = envs[np.argsort(self.draw(len(envs)))[:remainder]] if remainder else envs[:0]
        env = np.concatenate([np.tile(envs, per_env), extra_envs])
        quantile = self.draw(count)
        if not self.with_replacement:
            quantile = (np.arange(count) // len(envs) + quantile) / np.bincount(env)[env]
        rank = np.minimum((quantile * num_starts[env]).astype(np.int64), num_starts[env] - 1)
        # Rank the candidates by environment, then by age.
        ranks = (num_starts.cumsum() - num_starts)[env] + rank
        rings = writer.length, positions, positions - steps_after_first - num_starts
        jitted(window_kernels.draw)(
            ranks.astype(np.float64), False, rings, NO_INDEX, (steps_after_first, 0, False, False), cells, mask, 0
        )

    def update_priority(
        self,
        index: int | Tensor | tuple[Tensor, ...],
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
        generation: Tensor | None = None,
    ) -> None:
        """Update priorities like :meth:`PrioritizedSampler.update_priority`; do nothing without ``prioritized``."""
        if self.prioritized is not None:
            self.prioritized.update_priority(index, priority, storage=storage, generation=generation)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Set the priority of newly written cells; the storage calls this method."""
        if self.prioritized is not None:
            self.prioritized.mark_update(index, storage=storage)

    def clear(self) -> None:
        """Reset the sampler after the storage was emptied; ``ReplayBuffer.empty`` calls this method."""
        super().clear()
        if self.prioritized is not None:
            self.prioritized.clear()

    def __repr__(self) -> str:
        options = f"recent_data_steps={self.recent_data_steps}, recent_data_ratio={self.recent_data_ratio}"
        return f"{type(self).__name__}({self.batch_length}, {options})"
