"""Windows of successive steps."""

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

from torchrl_lightning._compat import SamplerHooks
from torchrl_lightning.entries import Path, leaves_of, nested_keys, path_of, tree_of, under
from torchrl_lightning.kernels import windows
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.parts import uniform
from torchrl_lightning.ranges import Checked, integer, one_of
from torchrl_lightning.replay.episode_index import NO_INDEX_HINT, EpisodeIndex
from torchrl_lightning.replay.rings import NO_INDEX
from torchrl_lightning.replay.steps import StepsMissing
from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.writer import RingWriter, writer_of
from torchrl_lightning.state import GENERATOR, Attribute, Stated

EPISODE_ENDS = ("inside", "across", "pad")
START_STATES = ("stored", "zero")
MAX_DRAWS = 1 << 16
"""So many steps are drawn before all of them are looked at."""


class SequenceSampler(Stated, SamplerHooks, Sampler):
    """Draw windows of ``batch_length`` successive steps of one environment; batches are ``[B, T]``.

    ``batch_size`` counts windows. A batch holds ``index`` (cells) and ``mask``, both ``[B, T]``; ``mask`` marks the
    steps that count in a loss. Windows never mix environments, nor join the newest to the oldest steps.

    The storage, ours or one of TorchRL's, is filled by a :class:`RingWriter`, whose index knows the episodes. Every
    beginning of a window is equally likely. Nothing is searched: steps are drawn until enough of them can begin one.
    Only where hardly one in ten thousand can, all are looked at, once per version of the rings.

    Args:
        batch_length: steps of a window.
        episode_ends: ``"inside"``: a window lies in one episode. ``"across"``: it may go on in the next one;
            ``is_init``, if it is stored, and the done flags of the batch mark where; ``is_init`` of a batch is also set
            where a trajectory was cut without a flag. ``"pad"``: it begins at any step that leaves one to count, and
            where the episode ends first, repeats the last step, which ``mask`` leaves out.
        burn_in: the first so many steps of each window only warm up a recurrent state; ``mask`` leaves them out.
        recurrent_keys: recurrent states, of which only the first one of a window is read. It is expanded over the
            window, with zeros where an episode starts, as TorchRL's ``GRUModule`` and ``LSTMModule`` read it; so is the
            state under ``"next"``.
        start_states: ``"stored"``: a window begins with the state that was stored with its first step. ``"zero"``: with
            zeros, which ``burn_in`` steps then warm up. Kapturowski et al. (2019) compare the two.
        generator: random generator; the buffer's takes its place.

    Raises:
        ValueError: an option out of range.

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
    reads_rings = True
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
        """Steps of a window, more than the burn-in."""
        self.burn_in = burn_in
        self.recurrent_keys = recurrent_keys
        self.start_states = start_states
        self._own_rng = generator
        self.clear()

    @property
    def episode_ends(self) -> str:
        """Where windows may lie: inside an episode, across the ends of episodes, or padded there."""
        return self._episode_ends

    @episode_ends.setter
    def episode_ends(self, value: str) -> None:
        self._episode_ends: str = one_of(value, "episode_ends", EPISODE_ENDS)
        self._by_episode = self.follows_episodes = value != "across"
        self.clear()

    def _check_length(self, value: Any, name: str) -> int:
        length = integer(value, name)
        if length <= self.burn_in:
            raise ValueError(f"{name} must be above burn_in={self.burn_in}, got {value!r}. Lower burn_in first.")
        return length

    def _check_burn_in(self, value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.batch_length:
            raise ValueError(f"{name} must lie in [0, batch_length), got {value!r} of {self.batch_length} steps.")
        return value

    def clear(self) -> None:
        """Forget what is known of the storage; called by ``ReplayBuffer.empty``."""
        # Version of the rings, length and burn-in of windows for which all beginnings were listed.
        self._listed = -1, 0, 0
        self._list: NDArray[np.float64] = np.empty(0)

    def sample(
        self, storage: Storage, batch_size: int, batch_length: int | Literal["own"] | None = "own"
    ) -> tuple[Tensor, dict[Any, Any]]:
        """Draw windows.

        Args:
            storage: what the cells are in.
            batch_size: how many windows.
            batch_length: steps of each, if not as built; more than the burn-in, or None for single steps.

        Returns:
            Cells ``[B, T]``; ``mask`` ``[B, T]`` and the recurrent states. Of single steps, all ``[B]``.

        Raises:
            StepsMissing: a ValueError, RuntimeError and AssertionError: nothing is stored, or windows are longer than
                any stored episode.
            ValueError: no :class:`RingWriter` fills the storage, or it is unknown where episodes end.
        """
        batch_size = integer(batch_size, "batch_size", 0)
        if batch_length == "own":
            batch_length = self.batch_length
        steps = 1 if batch_length is None else integer(batch_length, "batch_length", self.burn_in + 1)
        writer = self._writer(storage, batch_size, steps)
        cells = np.empty((batch_size, steps), np.int64)
        mask = np.empty(cells.shape, np.bool_)
        self._fill(writer, cells, mask)
        index = torch.from_numpy(cells)
        info: dict[Any, Any] = {"mask": torch.from_numpy(mask)}
        stored, across = self.start_states == "stored", not self._by_episode
        info.update(_first_states(storage, writer.rings.index, index, self.recurrent_keys, stored, across))
        if batch_length is None:
            return index.squeeze(1), {key: value.squeeze(1) for key, value in info.items()}
        return index, info

    def _fill(self, writer: RingWriter, cells: NDArray[np.int64], mask: NDArray[np.bool_]) -> None:
        episodes = NO_INDEX if writer.index is None else writer.index.arrays
        steps, draw = cells.shape[1], jitted(windows.draw)
        reach = self.burn_in if self._episode_ends == "pad" else steps - 1
        options = reach, self.burn_in, self._by_episode, self._episode_ends == "pad"
        rule = (writer.length, *writer.rings.arrays), episodes, options
        missing, found, drawn = len(cells), 0, 0
        # Where a window may end anywhere, every step that has room for one may begin it.
        size = 2 * missing if self._by_episode and reach else missing
        while missing and drawn < MAX_DRAWS:
            found = draw(uniform(size, self.generator), True, *rule, cells, mask, found)
            if found < 0:
                raise self._too_long(rule, steps)
            missing, drawn, size = len(cells) - found, drawn + size, min(4 * size, MAX_DRAWS)
        if missing:
            known = writer.rings.version, steps, self.burn_in
            if self._listed != known:
                self._list, self._listed = jitted(windows.all_starts)(*rule), known
            if not len(self._list):
                raise self._too_long(rule, steps)
            choice = (uniform(missing, self.generator) * len(self._list)).astype(np.int64)
            draw(self._list[choice], False, *rule, cells, mask, found)

    def _writer(self, storage: Storage, count: int, steps: int) -> RingWriter:
        if not len(storage):
            raise StepsMissing(f"Cannot sample {count} windows of {steps} steps: 0 steps are stored.")
        writer = writer_of(storage)
        if writer is None:
            raise ValueError(
                f"{type(self).__name__} follows episodes through rings, but no RingWriter fills this "
                f"{type(storage).__name__}; build the buffer with writer=RingWriter(num_envs=...), or draw slices with "
                "TorchRL's SliceSampler."
            )
        if writer.index is None and self._by_episode:
            raise ValueError(
                f"It is unknown where episodes end: the first data written had no entry {writer.done_key!r}. "
                'Store it, name another one by RingWriter(done_key=...), or take windows with episode_ends="across". '
                + NO_INDEX_HINT
            )
        return writer

    def _too_long(self, rule: tuple[Any, ...], steps: int) -> StepsMissing:
        longest = jitted(windows.longest_run)(*rule)
        what = "episode has" if self._by_episode else "run of steps of one environment has"
        return StepsMissing(
            f"There is no room for a window: the longest stored {what} {longest} steps, windows need {rule[2][0] + 1} "
            f"(batch_length={steps}, burn_in={self.burn_in}). Collect more, take shorter windows"
            + (', or pad them (episode_ends="pad").' if self.episode_ends == "inside" else ".")
        )

    def put_state(self, values: Mapping[str, Any]) -> None:
        """Forget what is known of the storage, and take over the generator."""
        self.clear()
        super().put_state(values)

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
    """Read recurrent states of windows, ``[B, T, ...]``, as TorchRL's ``GRUModule`` and ``LSTMModule`` read them.

    Only the first state of a window is read and expanded over ``T``, because these modules read the state at the first
    step of a row and wherever ``is_init`` splits it; there it is zero. Beside it, if stored, comes the state after the
    step, under ``"next"``, for unrolling over the next observations: that of the first step, and at a later ``is_init``
    the stored one. What is not ``stored`` is zero. Trajectories that were cut without a flag are split, too, and of
    windows across them, ``is_init`` is returned with these splits. Without a stored ``is_init`` nothing is set to zero:
    a trajectory begins with its stored state.
    """
    has_cuts = episodes is not None and episodes.has_cuts
    if not keys and not has_cuts:
        return {}
    cells = steps = index if across else index[:, :1]
    if isinstance(storage, RingStorage):
        if not has_cuts and not any(key[0] in storage.tree for key in keys):
            return {}
        tree, cells = storage.tree, cells.to(storage.device)
    else:  # what was read, is read; number it
        tree = tree_of(storage.get(cells).reshape(-1))
        cells = torch.arange(cells.numel(), device=index.device).view(cells.shape)
    leaves = dict(leaves_of(tree))
    init, begins = leaves.get(("is_init",)), None
    if init is not None:
        # Of uint8 flags, any() returns uint8.
        begins = init.index_select(0, cells.reshape(-1).to(init.device)).reshape(*cells.shape, -1).any(-1) != 0
    states: dict[Any, Tensor] = {}
    if episodes is not None and (has_cuts or init is None):
        firsts = episodes.are_first(steps).to(cells.device)
        begins = firsts if begins is None else begins | firsts
        if init is not None and across:
            flags = init.index_select(0, cells.reshape(-1)).view(*cells.shape, *init.shape[1:])
            states["is_init"] = episodes.with_begins(flags, steps)
    for path, leaf in leaves.items():
        after = path[0] == "next"
        if any(under(path[after:], key) for key in keys):
            if stored:
                states[path] = _expanded(leaf, cells, index.shape, begins, zero=not after and init is not None)
            else:
                states[path] = leaf.new_zeros(1).expand(*index.shape, *leaf.shape[1:])
    return states


def _expanded(leaf: Tensor, cells: Tensor, shape: torch.Size, begins: Tensor | None, *, zero: bool) -> Tensor:
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
