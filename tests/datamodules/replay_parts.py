"""What the tests of the replay DataModule are made of."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kit import ranks
from kit.ranks import reports  # noqa: F401
from kit.replay import BUFFERS, SIZE, dqn, experience, fit, prioritized, recurrent, replay_data, stored  # noqa: F401
from kit.runs import trainer as quiet_trainer
from torchrl_lightning.replay import UniformSampler

trainer = partial(quiet_trainer, limit_val_batches=0, max_epochs=3)


def run_ranks(script, folder, *arguments):
    """Run a script of this folder."""
    return ranks.run_ranks(Path(__file__).with_name(script), folder, *arguments)


def in_files(folder, sampler=UniformSampler, **settings):
    """Factory of a buffer over memory-mapped files."""
    return experience(sampler, folder, **settings)
