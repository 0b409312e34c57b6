"""Sampling of windows of successive steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._core.mixins import uniform
from torchrl_lightning._core.state import GENERATOR, Attribute, Stateful
from torchrl_lightning._core.torchrl_compat import SamplerHooks
from torchrl_lightning._core.tree import Path, is_below, leaves_of, nested_keys, path_of, tree_of
from torchrl_lightning._core.validators import Checked, integer, one_of
from torchrl_lightning.kernels import window_kernels
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.replay.episode_index import NO_INDEX_HINT, EpisodeIndex
from torchrl_lightning.replay.positions import MissingStepsError
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.ring_writer import RingWriter, writer_of
from torchrl_lightning.replay.rings import NO_INDEX

EPISODE_ENDS = ("inside", "across", "pad")
START_STATES = ("stored", "zero")
MAX_DRAWS = 1 << 16
"""Number of random draws before the sampler lists all valid starts."""


class SequenceSampler(Stateful, SamplerHooks, Sampler):
    """Sample windows of ``batch_length`` successive steps of one environment, as batches ``[B, T]``.

    ``batch_size`` counts windows. A batch contains ``index`` (cells) and ``mask``, both ``[B, T]``; ``mask`` is true
    for the steps that a loss should use. A window never mixes environments and never joins the newest to the oldest
    step.

    A :class:`RingWriter` must fill the storage, because the sampler reads the writer's episode index. The storage may
    be a TorchRL storage. Every valid start is equally likely. The sampler draws random steps until enough of them are
    valid starts. If fewer than about one in ten thousand draws are valid, the sampler lists all valid starts. The list
    is used until the rings change.

    Args:
        batch_length: steps of a window.
        episode_ends: ``"inside"``: a window stays in one episode. ``"across"``: a window may continue in the next
            episode. The done flags and ``is_init`` (if stored) mark the border. In a batch, ``is_init`` also marks
            trajectories that were cut without a flag. ``"pad"``: a window starts at any step with at least one step
            after the burn-in. After the end of the episode, the window repeats the last step, and ``mask`` excludes the
            copies.
        burn_in: number of steps at the start of a window that only warm up a recurrent state; ``mask`` excludes these
            steps.
        recurrent_keys: keys of recurrent states. The sampler reads only the first state of a window and repeats this
            state for all steps of the window, with zeros at the start of an episode, as TorchRL's ``GRUModule`` and
            ``LSTMModule`` expect. The sampler does the same with the state under ``"next"``.
        start_states: ``"stored"``: a window starts with the stored state of its first step. ``"zero"``: a window starts
            with a zero state, which ``burn_in`` warms up. Kapturowski et al. (2019) compare both.
        generator: random generator; a buffer replaces it by the buffer's generator.

    Raises:
        ValueError: an option is out of range.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer, RingStorage
        >>> buffer = ExperienceBuffer(storage=RingStorage(100), sampler=SequenceSampler(4), batch_size=2)
        >>> done = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0], dtype=torch.bool).unsqueeze(-1)
        >>> _ = buffer.extend(TensorDict({"a": torch.arange(8), "next": {"done": done}}, [8]))
        >>> batch = buffer.sample()
        >>> batch.shape, batch.names, set(batch["a"][:, 0].tolist()) <= {0, 1}
        (torch.Size([2, 4]), [None, 'time'], True)
    """

    OWNER, VERSION = "sequence sampler", 2
    STATE: ClassVar[Mapping[str, Attribute]] = {"generator": GENERATOR}
    supports_uneven_rings = True
    batch_length = Checked("_check_length")
    burn_in = Checked("_check_burn_in")
    start_states = Checked(lambda value, name: one_of(value, name, START_STATES))
    recurrent_keys = Checked(lambda value, name: [path_of(key) for key in nested_keys(value)])

    def __init__(
        self,
        batch_length: int = 16,
        *,
        episode_ends: str = "inside",
        burn_in: int = 0,
        recurrent_keys: Sequence[NestedKey] = ("recurrent_state",),
        start_states: str = "stored",
        generator: torch.Generator | None = None,
    ) -> None:
        self.episode_ends = episode_ends
        self.__dict__["burn_in"] = 0
        self.batch_length = batch_length
        """Steps of a window; more than ``burn_in``."""
        self.burn_in = burn_in
        self.recurrent_keys = recurrent_keys
        self.start_states = start_states
        self._generator = generator
        self.clear()

    @property
    def episode_ends(self) -> str:
        """Treatment of episode ends: windows stay inside an episode, cross its end, or are padded."""
        return self._episode_ends

    @episode_ends.setter
    def episode_ends(self, value: str) -> None:
        self._episode_ends: str = one_of(value, "episode_ends", EPISODE_ENDS)
        self._stays_in_episode = self.follows_episodes = value != "across"
        self.clear()

    def _check_length(self, value: Any, name: str) -> int:
        length = integer(value, name)
        if length <= self.burn_in:
            raise ValueError(f"{name} must be above burn_in={self.burn_in}, got {value!r}. Lower burn_in first.")
        return length

    def _check_burn_in(self, value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.batch_length:
            raise ValueError(f"{name} must be in [0, {self.batch_length}), below batch_length, got {value!r}.")
        return value

    def clear(self) -> None:
        """Clear the list of valid starts; ``ReplayBuffer.empty`` calls this."""
        # The listed starts are valid for this ring version, window length and burn-in.
        self._listed_for = -1, 0, 0
        self._valid_starts: NDArray[np.float64] = np.empty(0)

    def sample(
        self,
        storage: Storage,
        batch_size: int,
        batch_length: int | Literal["own"] | None = "own",
    ) -> tuple[Tensor, dict[Any, Any]]:
        """Sample windows.

        Args:
            storage: the storage of the cells.
            batch_size: number of windows.
            batch_length: steps of each window, more than ``burn_in``; by default the sampler's ``batch_length``; None
                for single steps.

        Returns:
            Cells ``[B, T]``, and a dict with ``mask`` ``[B, T]`` and the recurrent states; all ``[B]`` for single
            steps.

        Raises:
            MissingStepsError: the storage is empty, or windows are longer than all stored episodes. The error is also a
                ValueError, RuntimeError and AssertionError.
            ValueError: no :class:`RingWriter` fills the storage, or the ends of episodes are unknown.
        """
        batch_size = integer(batch_size, "batch_size", 0)
        if batch_length == "own":
            batch_length = self.batch_length
        steps = 1 if batch_length is None else integer(batch_length, "batch_length", self.burn_in + 1)
        writer = self._get_writer(storage, batch_size, steps)
        cells = np.empty((batch_size, steps), np.int64)
        mask = np.empty(cells.shape, np.bool_)
        self._draw_windows(writer, cells, mask)
        index = torch.from_numpy(cells)
        info: dict[Any, Any] = {"mask": torch.from_numpy(mask)}
        stored, across = self.start_states == "stored", not self._stays_in_episode
        info.update(_first_states(storage, writer.rings.index, index, self.recurrent_keys, stored, across))
        if batch_length is None:
            return index.squeeze(1), {key: value.squeeze(1) for key, value in info.items()}
        return index, info

    def _draw_windows(self, writer: RingWriter, cells: NDArray[np.int64], mask: NDArray[np.bool_]) -> None:
        episodes = NO_INDEX if writer.index is None else writer.index.arrays
        steps, draw = cells.shape[1], jitted(window_kernels.draw)
        reach = self.burn_in if self._episode_ends == "pad" else steps - 1
        options = reach, self.burn_in, self._stays_in_episode, self._episode_ends == "pad"
        kernel_arguments = (writer.length, *writer.rings.arrays), episodes, options
        missing, filled, drawn = len(cells), 0, 0
        # If windows must stay in an episode, some draws are invalid, so draw twice the number.
        size = 2 * missing if self._stays_in_episode and reach else missing
        while missing and drawn < MAX_DRAWS:
            filled = draw(uniform(size, self.generator), True, *kernel_arguments, cells, mask, filled)
            if filled < 0:
                raise self._no_room_error(kernel_arguments, steps)
            missing, drawn, size = len(cells) - filled, drawn + size, min(4 * size, MAX_DRAWS)
        if missing:
            source = writer.rings.version, steps, self.burn_in
            if self._listed_for != source:
                self._valid_starts, self._listed_for = jitted(window_kernels.all_starts)(*kernel_arguments), source
            if not len(self._valid_starts):
                raise self._no_room_error(kernel_arguments, steps)
            choice = (uniform(missing, self.generator) * len(self._valid_starts)).astype(np.int64)
            draw(self._valid_starts[choice], False, *kernel_arguments, cells, mask, filled)

    def _get_writer(self, storage: Storage, count: int, steps: int) -> RingWriter:
        if not len(storage):
            raise MissingStepsError(f"Cannot sample {count} windows of {steps} steps: 0 steps are stored.")
        writer = writer_of(storage)
        if writer is None:
            raise ValueError(
                f"{type(self).__name__} needs a RingWriter, but none fills this {type(storage).__name__}. Build the "
                "buffer with writer=RingWriter(num_envs=...), or sample slices with TorchRL's SliceSampler."
            )
        if writer.index is None and self._stays_in_episode:
            raise ValueError(
                f'episode_ends must be "across" without an episode index, got {self.episode_ends!r}. The first data '
                f"had no entry {writer.done_key!r}. Write it, or set RingWriter(done_key=...). " + NO_INDEX_HINT
            )
        return writer

    def _no_room_error(self, kernel_arguments: tuple[Any, ...], steps: int) -> MissingStepsError:
        longest = jitted(window_kernels.longest_run)(*kernel_arguments)
        run = "episode" if self._stays_in_episode else "run of steps of one environment"
        return MissingStepsError(
            f"No window fits: the longest stored {run} has {longest} steps, a window needs "
            f"{kernel_arguments[2][0] + 1} (batch_length={steps}, burn_in={self.burn_in}). Collect more steps, lower "
            "batch_length" + (', or set episode_ends="pad".' if self.episode_ends == "inside" else ".")
        )

    def apply_state(self, values: Mapping[str, Any]) -> None:
        """Clear the list of valid starts, and restore the generator."""
        self.clear()
        super().apply_state(values)

    def __repr__(self) -> str:
        options = f"episode_ends={self.episode_ends!r}, burn_in={self.burn_in}"
        return f"{type(self).__name__}({self.batch_length}, {options})"


def _first_states(
    storage: Storage,
    episodes: EpisodeIndex | None,
    index: Tensor,
    keys: Collection[Path],
    stored: bool,
    across: bool,
) -> dict[Any, Tensor]:
    """Read recurrent states of windows, ``[B, T, ...]``, in the form that ``GRUModule`` and ``LSTMModule`` expect.

    These TorchRL modules read the state at the first step of a row and at each step with ``is_init``. So the first
    state of a window is expanded over ``T``, and the state is zero at each ``is_init``. If the state under ``"next"``
    is stored, it is also returned, for unrolling over the next observations. It contains the stored state of the first
    step and of each later step with ``is_init``. With ``stored=False`` all states are zero. A cut without a flag also
    splits a window; the returned ``is_init`` marks these splits if windows may cross cuts. Without a stored
    ``is_init``, a trajectory begins with its stored state instead of zero.
    """
    has_cuts = episodes is not None and episodes.has_cuts
    if not keys and not has_cuts:
        return {}
    cells = steps = index if across else index[:, :1]
    if isinstance(storage, RingStorage):
        if not has_cuts and not any(key[0] in storage.tree for key in keys):
            return {}
        tree, cells = storage.tree, cells.to(storage.device)
    else:  # the leaf contains only the sampled rows, so index them by position
        tree = tree_of(storage.get(cells).reshape(-1))
        cells = torch.arange(cells.numel(), device=index.device).view(cells.shape)
    leaves = dict(leaves_of(tree))
    init, begins = leaves.get(("is_init",)), None
    if init is not None:
        # any() returns uint8 for uint8 flags.
        begins = init.index_select(0, cells.reshape(-1).to(init.device)).reshape(*cells.shape, -1).any(-1) != 0
    states: dict[Any, Tensor] = {}
    if episodes is not None and (has_cuts or init is None):
        firsts = episodes.are_first(steps).to(cells.device)
        begins = firsts if begins is None else begins | firsts
        if init is not None and across:
            flags = init.index_select(0, cells.reshape(-1)).view(*cells.shape, *init.shape[1:])
            states["is_init"] = episodes.with_begins(flags, steps)
    for path, leaf in leaves.items():
        is_next = path[0] == "next"
        if any(is_below(path[is_next:], key) for key in keys):
            if stored:
                states[path] = _expand_over_window(
                    leaf, cells, index.shape, begins, zero=not is_next and init is not None
                )
            else:
                states[path] = leaf.new_zeros(1).expand(*index.shape, *leaf.shape[1:])
    return states


def _expand_over_window(leaf: Tensor, cells: Tensor, shape: torch.Size, begins: Tensor | None, *, zero: bool) -> Tensor:
    cells = cells.to(leaf.device)
    state = leaf.index_select(0, cells[:, 0])
    tail = [1] * (state.ndim - 1)
    if zero and begins is not None:
        state = state.masked_fill(begins[:, 0].view(-1, *tail), 0)
    states = state.unsqueeze(1).expand(*shape, *state.shape[1:])
    if begins is None or begins.shape[1] == 1:
        return states
    row, step = begins[:, 1:].nonzero(as_tuple=True)
    if not len(row):
        return states
    states = states.clone()
    states[row, step + 1] = 0 if zero else leaf.index_select(0, cells[row, step + 1])
    return states
