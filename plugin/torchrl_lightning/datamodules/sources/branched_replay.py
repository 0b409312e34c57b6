"""Batches of real experience and of branches that a world model generates from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from torchrl_lightning._core.protocols import LearnerApi
from torchrl_lightning._core.settings import PositiveInt, Settings, setting
from torchrl_lightning._core.state import (
    Attribute,
    Child,
    Stateful,
    bounded_integer,
    check_state,
    list_of,
    mapping,
    sequence,
)
from torchrl_lightning._core.tree import cast_rounded, schema_of
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import integer
from torchrl_lightning.datamodules.sources.mixed_replay import MixedReplay
from torchrl_lightning.dynamics import HoldoutSplit
from torchrl_lightning.replay import ExperienceBuffer, RingStorage


def _first_seeds(generator: torch.Generator) -> list[int]:
    """Draw the seeds of the split and of the branches for the first fit."""
    seeds: list[int] = torch.randint(2**60, (2,), generator=generator).tolist()
    return seeds


class BranchedReplay(Settings, Stateful, ConfigSafe):
    r"""Draw batches of real rows and of rows from the agent's world model, as in MBPO.

    Use it as the ``source=`` of a ``ReplayDataModule``. Before the first batch, and after every ``frames_per_fit`` new
    rows, the module fits its world model to all rows except the held-out ones. It then generates ``branches_per_fit``
    branches from uniformly drawn states; the branches of the last ``fits_kept`` fits are stored. A branch has \(k\)
    rows, or fewer if the episode terminates. ``lengthened_between`` contains two numbers of written rows. Between them,
    \(k\) grows linearly from ``first_length`` to ``last_length``. A branch that stops at its length is not terminal, so
    the value of its last row is bootstrapped.

    Args:
        buffer: the buffer of collected steps.
        real_ratio: the share of real rows in each batch.
        frames_per_fit: rows written between two fits.
        branches_per_fit: branches of each fit.
        fits_kept: number of fits with stored branches.
        first_length: initial length of branches.
        last_length: final length of branches.
        lengthened_between: numbers of written rows at which the length begins and stops to grow.
        validation_fraction: share of the rows that is held out from the fits. A row stays on its side of the split for
            the whole run.
        max_validation: largest number of held-out rows.

    Raises:
        ValueError: A number is out of range, or the buffer computes n-step returns. Before or at a fit: the training
            part or the held-out part has no rows, or the world model does not generate an entry that the buffer stores.

    Examples:
        >>> from functools import partial
        >>> from torchrl_lightning import MBPOModule, ReplayDataModule
        >>> source = partial(BranchedReplay, real_ratio=0.1, branches_per_fit=400, last_length=5)
        >>> data = ReplayDataModule("Pendulum-v1", buffer=ExperienceBuffer, source=source)
        >>> module = MBPOModule()  # to be fitted with it
    """

    RUNTIME_ARGUMENTS: ClassVar[tuple[str, ...]] = ("buffer",)

    buffer: ExperienceBuffer = setting(kw_only=False)
    real_ratio: float = 0.05
    frames_per_fit: PositiveInt = 250
    branches_per_fit: PositiveInt = 10_000
    fits_kept: PositiveInt = 4
    first_length: PositiveInt = 1
    last_length: PositiveInt = 1
    lengthened_between: Sequence[int] = (0, 0)
    validation_fraction: float = 0.2
    max_validation: int = 5000

    OWNER = "branched replay"
    STATE = {
        "mixed": Attribute(
            check_for=lambda replay: replay._restore_mixture,
            attribute="_mixture",
            to_saved=lambda replay: replay.state_dict(copy=False),
        ),
        "split": Child(),
        "fits": Attribute(bounded_integer()),
        "fitted_at": Attribute(bounded_integer(), "_fitted_at"),
        "rows": Attribute(list_of(bounded_integer()), "_rows_per_fit"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.real_ratio < 1.0:
            raise ValueError(
                f"real_ratio must be above 0 and below 1, got {self.real_ratio!r}. Leave source= out to draw only real "
                "rows."
            )
        if self.buffer.n_steps > 1:
            raise ValueError(
                f"n_steps of the buffer must be 1, because branches are generated step by step, got "
                f"{self.buffer.n_steps}. Set n_steps=1."
            )
        between = self.lengthened_between
        bounds = list(between) if isinstance(between, Sequence) else [between]
        if len(bounds) != 2 or bounds != sorted(integer(rows, "lengthened_between", 0) for rows in bounds):
            raise ValueError(f"lengthened_between must be two integers in ascending order, got {bounds}.")
        self.lengthened_between = tuple(bounds)
        self.require_effect("first_length", self.first_length == self.last_length or bounds[1], "lengthened_between")
        grows = self.first_length != self.last_length or not bounds[1]
        self.require_effect("lengthened_between", grows, "a last_length that differs from first_length")
        self.split = HoldoutSplit(self.validation_fraction, self.max_validation)
        self.fits = 0
        self._fitted_at = 0  # number of written rows at the last fit
        self._rows_per_fit: list[int] = []  # generated rows of each of the last fits
        self._mixture = self.make_mixture(self.max_rows(self.length(0)))

    def _restore_mixture(self, value: Any, name: str) -> MixedReplay:
        """Return a mixture with the branches of a state, in a buffer of the saved size, which grows during a run."""
        largest = self.max_rows(max(self.first_length, self.last_length))
        others = check_state(value, {"others": sequence}, MixedReplay.OWNER)["others"]
        state = check_state(others[0] if others else None, {"storage": mapping}, ExperienceBuffer.OWNER)["storage"]
        size = check_state(state, {"max_size": bounded_integer(1, largest)}, RingStorage.OWNER)["max_size"]
        mixture = self.make_mixture(size)
        mixture.load_state_dict(value)
        return mixture

    @property
    def imagined(self) -> ExperienceBuffer:
        """The buffer of branches."""
        return self._mixture.buffers[1]

    def length(self, written: int) -> int:
        """Return the length of branches after a number of written rows.

        Examples:
            >>> source = BranchedReplay(ExperienceBuffer(), last_length=5, lengthened_between=(100, 200))
            >>> [source.length(written) for written in (0, 100, 150, 199, 200, 1000)]
            [1, 1, 3, 4, 5, 5]
        """
        begin, end = self.lengthened_between
        if written >= end:
            return self.last_length
        if written <= begin:
            return self.first_length
        return self.first_length + int((written - begin) * (self.last_length - self.first_length) / (end - begin))

    def max_rows(self, length: int) -> int:
        """Return the largest total number of rows for branches of a length."""
        return self.fits_kept * self.branches_per_fit * max(length, self.first_length)

    def _make_branch_buffer(self, size: int, old: ExperienceBuffer | None = None) -> ExperienceBuffer:
        """Return a buffer of ``size`` branch rows with the newest rows of an old buffer."""
        storage = RingStorage(size, device=self.buffer.storage.device)
        # The first fit seeds this generator.
        generator = torch.Generator() if old is None else old.generator
        branches = ExperienceBuffer(storage=storage, generator=generator, check_successors=False)
        if old is not None and len(old):
            writer = old.writer
            ages = torch.arange(int(writer.oldest[0]), int(writer.positions[0]))[-size:]
            branches.extend(self._like_real(old.storage.get(writer.cell(torch.zeros_like(ages), ages))))
        return branches

    def _like_real(self, rows: TensorDictBase) -> TensorDictBase:
        """Convert imagined rows to the dtypes of the real rows."""
        real = self.buffer.storage.data
        return rows.named_apply(lambda key, value: cast_rounded(value, real.get(key).dtype), nested_keys=True)

    def make_mixture(self, size: int) -> MixedReplay:
        """Return a mixture of real rows and an empty buffer of ``size`` branch rows."""
        return MixedReplay(self.buffer, [self._make_branch_buffer(size)], [self.real_ratio, 1.0 - self.real_ratio])

    # ------------------------------------------------------------------ fits

    def incompatibility(self, specs: Any, learner: Any) -> str | None:
        """Return the reason why a learner does not fit this source; None if it fits."""
        if learner is None or LearnerApi.of(learner).can_imagine:
            return None
        return (
            f"{type(self).__name__} needs a learner with fit_dynamics and imagine, got {type(learner).__name__}. "
            "Choose one, such as model=mbpo (MBPOModule), or another DataModule, such as data=uniform."
        )

    def check_first_fit(self, steps: int, seed: int) -> None:
        """Validate that both sides of the split have rows at the first fit; raise ValueError if a side is empty.

        Args:
            steps: Steps of each environment before the first fit.
            seed: The seed of the buffer's generator.
        """
        num_envs = self.buffer.parts[2].num_envs
        rows = steps * num_envs
        if rows > self.buffer.storage.max_size:
            return
        seed, _ = _first_seeds(torch.Generator().manual_seed(seed))
        split = HoldoutSplit(self.validation_fraction, self.max_validation, seed=seed)
        training = split.count_training(num_envs, steps)
        if training in (0, rows):
            raise ValueError(
                f"validation_fraction={self.validation_fraction} and max_validation={self.max_validation} leave none "
                f"of {rows} rows for {'validation' if training else 'training'} when the first fit begins. Change "
                "validation_fraction, or raise warmup_frames."
            )

    def prepare(self, module: Any) -> None:
        """Let the module fit its world model and generate branches, if a fit is due."""
        written = self.buffer.writer.write_count
        if self.fits and written - self._fitted_at < self.frames_per_fit:
            return
        if not self.fits:
            split, branches = _first_seeds(self.buffer.generator)
            self.split = HoldoutSplit(self.validation_fraction, self.max_validation, seed=split)
            self.imagined.generator.manual_seed(branches)
        self.split.extend(self.buffer.writer)
        storage, cells = self.buffer.storage, self.buffer.writer.rings.filled_cells()
        training, validation = self.split.parts(cells)
        rows = storage.get(training)
        module.fit_dynamics(rows, storage.get(validation))
        length = self.length(written)
        starts = torch.randint(len(cells), (self.branches_per_fit,), generator=self.imagined.generator)
        branches = module.imagine(storage.get(cells[starts]), length)
        keys, branch_keys = (list(batch.keys(True, True)) for batch in (rows, branches))
        if unknown := [key for key in keys if key not in branch_keys]:
            raise ValueError(
                f"the buffer must store only entries that the world model generates, got "
                f"{', '.join(map(repr, unknown))}. Exclude them from the buffer."
            )
        branches, stored = self._like_real(branches.select(*keys)), self.imagined.storage.data
        size = self.max_rows(length)
        # Earlier releases stored imagined observations as floating-point numbers.
        if size != self.imagined.storage.max_size or (
            stored is not None and schema_of(stored, 1) != schema_of(branches, 1)
        ):
            self._mixture.buffers[1] = self._make_branch_buffer(size, self.imagined)
        rows_per_fit = self._rows_per_fit[max(0, len(self._rows_per_fit) - self.fits_kept + 1) :]
        if (surplus := len(self.imagined) - sum(rows_per_fit)) > 0:  # rows of earlier fits
            self.imagined.writer.drop(surplus)
        self.imagined.extend(branches.to(storage.device))
        self._rows_per_fit = [*rows_per_fit, len(branches)]
        self.fits, self._fitted_at = self.fits + 1, written

    # ------------------------------------------------------------------ a source of batches

    def draw(self, batch_size: int) -> TensorDictBase:
        """Draw a batch ``[batch_size]``; the entry ``source`` is 0 for real rows and 1 for imagined ones.

        Raises:
            RuntimeError: Branches do not exist yet.
        """
        return self._mixture.draw(batch_size)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Do nothing, because imagined rows do not have priorities, and real rows are drawn without priorities."""

    def write_back(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> None:
        """Write rewritten entries of a batch back into their cells."""
        self._mixture.write_back(batch, keys)
