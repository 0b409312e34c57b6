"""Kills a process at random moments while it saves its replay buffer, and looks at what it left.

    python tests/datamodules/kill_run.py FOLDER [--kills 50] [--seed 0]

Cells in memory and memory-mapped ones take turns. Each child resumes from the last checkpoint, then extends its buffer
and saves in turn. What is offered for resuming must be whole and no older than the last save that had returned.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import select
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from tensordict import TensorDict

from torchrl_lightning import ReplayDataModule
from torchrl_lightning.collectors.threads import kept_threads
from torchrl_lightning.replay import ExperienceBuffer, PrioritizedSampler, RingStorage

CELLS, ROWS, WIDTH = 4096, 64, 64
STATE = "state.pt"


def make(folder, in_files):
    data = ReplayDataModule(
        "CartPole-v1",
        buffer=lambda num_envs: ExperienceBuffer(
            storage=RingStorage(CELLS, scratch_dir=folder / "cells" if in_files else None),
            sampler=PrioritizedSampler(CELLS, alpha=0.6, beta=0.4),
            num_envs=num_envs,
        ),
        checkpoint_buffer="beside",
        buffer_dir=folder / "buffer",
        seed=0,
    )
    data.setup("fit")
    if (folder / STATE).exists():
        data.load_state_dict(torch.load(folder / STATE, weights_only=True))
    return data


def write(folder, data):
    """Save as Lightning does: the buffer first, then the checkpoint in place of the one before."""
    data.save_buffer()
    torch.save(data.state_dict(), folder / "state.new")
    os.replace(folder / "state.new", folder / STATE)


def step(folder, data):
    update = data.updates + 1
    # Every row tells its position, in each of its numbers.
    position = torch.arange((update - 1) * ROWS, update * ROWS)
    data.buffer.extend(TensorDict({"step": position.unsqueeze(1).expand(-1, WIDTH)}, [ROWS]))
    data.buffer.update_priority(position % CELLS, 1.0 + position % 7)
    data.updates, data._snapshot = update, None
    write(folder, data)


def child(folder, in_files, report):
    data = make(folder, in_files)
    while True:
        step(folder, data)
        os.write(report, f"{data.updates}\n".encode())


def check(folder, in_files, returned):
    """Give the update that a resumed run would go on from, or say what is wrong."""
    if not (folder / STATE).exists():
        assert returned == 0, f"nothing to resume from, but save {returned} had returned"
        return 0
    data = make(folder, in_files)
    assert data.updates >= returned, f"offered {data.updates}, but save {returned} had returned"
    cells = torch.arange(CELLS)
    rows = data.buffer.storage.get(cells[data.buffer.writer.is_filled(cells)])["step"]
    assert (rows == rows[:, :1]).all(), "a row is torn"
    end = data.updates * ROWS
    found, expected = rows[:, 0].sort().values, torch.arange(max(0, end - CELLS), end)
    assert torch.equal(found, expected), "rows are missing or of another save"
    cells = rows[:, 0] % CELLS
    leaves = data.buffer.sampler.table.tree[cells]
    assert torch.allclose(leaves, ((1.0 + rows[:, 0] % 7).double() + 1e-8) ** 0.6), "priorities of another save"
    assert len(list((folder / "buffer").glob("*/rank_0/*"))) <= 8, "states pile up"
    data.close()
    return data.updates


def kill_once(folder, in_files, seconds):
    """Give the last save that returned."""
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(readable)
        try:
            child(folder, in_files, writable)
        finally:
            os._exit(1)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        said = [pipe.readline()] if select.select([pipe], [], [], 60)[0] else []  # it has begun
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        said += pipe.readlines()
    numbers = [int(line) for line in said if line.endswith("\n")]
    assert numbers, "the child failed before its first save"
    return numbers[-1]


@contextlib.contextmanager
def one_thread():
    """Compute in one thread: a forked process has no others."""
    with kept_threads():
        torch.set_num_threads(1)
        yield


def kill(folder, kills, seed):
    """Give the update that the last resumed run would go on from."""
    moments, resumed = random.Random(seed), 0
    with one_thread(), tempfile.TemporaryDirectory() as aside:
        data = make(Path(aside), in_files=False)
        step(Path(aside), data)  # compiles what every process would compile anew
        data.close()
        for number in range(kills):
            in_files = bool(number % 2)
            below = folder / ("files" if in_files else "memory")
            below.mkdir(parents=True, exist_ok=True)
            returned = kill_once(below, in_files, moments.uniform(0.0, 0.15))
            resumed = check(below, in_files, returned)
    return resumed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    resumed = kill(arguments.folder, arguments.kills, arguments.seed)
    sys.stdout.write(f"{arguments.kills} kills survived, {resumed} saves\n")


if __name__ == "__main__":
    main()
