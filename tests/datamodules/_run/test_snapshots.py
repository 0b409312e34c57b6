"""Buffer states beside checkpoints: which states stay, and which state a process leaves if it is killed in a save."""

from __future__ import annotations

import os
import random
from secrets import token_hex

import pytest
import torch
from tensordict import TensorDict

from kit.forks import killed_after
from torchrl_lightning.datamodules._run.snapshots import BufferSnapshots
from torchrl_lightning.replay import ExperienceBuffer, PrioritizedSampler, RingStorage

CELLS, ROWS, WIDTH = 4096, 64, 64


class Saved:
    """A buffer that resumes from the last checkpoint of a folder and is saved there."""

    def __init__(self, folder, in_files=False):
        storage = RingStorage(CELLS, scratch_dir=folder / "cells" if in_files else None)
        self.buffer = ExperienceBuffer(storage=storage, sampler=PrioritizedSampler(CELLS, alpha=0.6, beta=0.4))
        self.snapshots, self.folder, self.updates = BufferSnapshots(folder / "buffer", 0, token_hex(4)), folder, 0
        if (folder / "state.pt").exists():
            self.updates, reference = torch.load(folder / "state.pt", weights_only=True)
            self.snapshots.load(self.buffer, reference)

    @property
    def kept(self):
        return sorted(path.name.rpartition("_")[0] for path in self.snapshots.folder.iterdir())

    def update(self):
        """Write rows that repeat their position in each column, and write their priorities."""
        position = torch.arange(self.updates * ROWS, (self.updates + 1) * ROWS)
        self.buffer.extend(TensorDict({"step": position.unsqueeze(1).expand(-1, WIDTH)}, [ROWS]))
        self.buffer.update_priority(position % CELLS, 1.0 + position % 7)
        self.updates += 1

    def save(self):
        """Write the buffer first and then replace the checkpoint, as Lightning does."""
        reference = self.snapshots.save(self.buffer, self.updates)
        torch.save((self.updates, reference), self.folder / "state.new")
        os.replace(self.folder / "state.new", self.folder / "state.pt")

    def check(self):
        """Check that no row is torn, missing or from another save."""
        rows = self.buffer.storage.get(self.buffer.writer.rings.filled_cells())["step"]
        assert (rows == rows[:, :1]).all(), "a row is torn"
        end, position = self.updates * ROWS, rows[:, 0].sort().values
        assert torch.equal(position, torch.arange(max(0, end - CELLS), end)), "rows are missing or of another save"
        leaves = self.buffer.sampler.table.tree[position % CELLS]
        assert torch.allclose(leaves, ((1.0 + position % 7).double() + 1e-8) ** 0.6), "priorities of another save"


def write(folder, in_files):
    saved = Saved(folder, in_files)
    while True:
        saved.update()
        saved.save()
        yield saved.updates


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_process_killed_while_it_saves_leaves_a_whole_state(tmp_path):
    moments = random.Random(0)
    warm = Saved(tmp_path / "aside")
    warm.update()  # compiles once, so that not every process compiles
    for number in range(6):
        in_files = bool(number % 2)
        folder = tmp_path / ("files" if in_files else "memory")
        folder.mkdir(exist_ok=True)
        *_, returned = killed_after(moments.uniform(0.0, 0.15), write, folder, in_files)
        saved = Saved(folder, in_files)
        assert saved.updates >= returned, "an older state than the last that was saved"
        saved.check()
        assert len(saved.kept) <= 8, "states pile up"


def test_resumed_state_is_kept_until_two_states_follow(tmp_path):
    first = Saved(tmp_path)
    first.update()
    first.save()
    # These processes are killed after they write the buffer and before they write the checkpoint.
    for updates in range(2, 5):
        other = Saved(tmp_path)
        other.check()
        other.snapshots.save(other.buffer, updates)
    again = Saved(tmp_path)
    for _ in range(2):
        again.update()
        again.save()
    assert again.kept == ["after_2", "after_3"]
    Saved(tmp_path).check()
