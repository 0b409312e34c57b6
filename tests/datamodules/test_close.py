"""A run ends its collector and processes; tests of the command line cover the interruption of a run."""

from __future__ import annotations

import multiprocessing
from functools import partial

import pytest
from tensordict.nn import TensorDictModule

from kit.actor_critic import TinyActorCritic, fit, rollouts
from kit.forks import forked_workers
from torchrl_lightning import AsynchronousCollector, EnvironmentRecipe

ASYNC = EnvironmentRecipe("CartPole-v1", vectorization="async")
WORKER = partial(AsynchronousCollector, "CartPole-v1", num_workers=1, num_envs=4, frames_per_batch=64)


@pytest.mark.parametrize(
    ("settings", "processes"),
    [({}, 0), ({"env": ASYNC, "eval_env": ASYNC}, 4), ({"collector": WORKER}, 1)],
    ids=["none", "environments", "workers"],
)
def test_exception_ends_collector_and_processes(settings, processes, tmp_path):
    children = []

    class Unlucky(TinyActorCritic):
        def training_step(self, batch, batch_idx):
            children.append(len(multiprocessing.active_children()))
            raise RuntimeError("out of luck")

    data = rollouts(**settings)
    with forked_workers(), pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, data, Unlucky())
    assert children == [processes]
    assert multiprocessing.active_children() == []
    assert data.collector is None


def test_recipe_is_stepped_in_processes_only_for_collection():
    data = rollouts(env=ASYNC, eval_env=ASYNC, num_envs=2)
    assert (data.specs.num_envs, data.fingerprint()["num_envs"]) == (2, 2)
    left = TensorDictModule(lambda x: x[..., 0].long() * 0, ["observation"], ["action"])
    assert len(data.evaluate(left, 2)) == 2
    assert multiprocessing.active_children() == []
    data.close()


def test_closing_twice_and_before_anything_is_harmless():
    data = rollouts()
    data.close()
    data.setup("fit")
    data.close()
    data.close()
