from __future__ import annotations

from functools import partial

import pytest
import torch

from kit.actor_critic import TinyActorCritic, rollouts
from kit.demonstrated_runs import shown
from kit.demonstrations import saved
from kit.runs import trainer


@pytest.fixture
def make_data():
    made = []

    def make(**kwargs):
        made.append(rollouts(**kwargs))
        return made[-1]

    yield make
    for data in made:
        data.close()


@pytest.fixture
def make_trainer(tmp_path):
    return partial(trainer, tmp_path, limit_val_batches=0, max_epochs=3)


@pytest.fixture
def make_module():
    def make(module_class=TinyActorCritic, seed=0, **kwargs):
        torch.manual_seed(seed)
        return module_class(**kwargs)

    return make


@pytest.fixture
def human(tmp_path):
    """A folder with one demonstration."""
    return saved(tmp_path / "human", shown(7))


@pytest.fixture
def tiny_actor_critic():
    return TinyActorCritic
