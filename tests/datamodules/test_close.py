from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from tensordict.nn import TensorDictModule

from kit.forks import Forked, as_script
from torchrl_lightning import EnvironmentRecipe


def test_an_exception_ends_collector_and_environment(make_data, make_trainer, make_module, tiny_actor_critic):
    class Failing(tiny_actor_critic):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("out of luck")

    data = make_data()
    with pytest.raises(RuntimeError, match="out of luck"):
        make_trainer().fit(make_module(Failing), datamodule=data)
    assert data.collector is None


def test_only_collection_steps_a_recipe_in_processes_which_end_with_it(
    make_data, make_trainer, make_module, tiny_actor_critic
):
    children = []

    class Failing(tiny_actor_critic):
        def training_step(self, batch, batch_idx):
            children.append(len(multiprocessing.active_children()))
            raise RuntimeError("out of luck")

    recipe = EnvironmentRecipe("CartPole-v1", vectorization="async")
    data = make_data(env=recipe, eval_env=recipe, num_envs=2)
    assert (data.specs.num_envs, data.fingerprint()["num_envs"]) == (2, 2)
    left = TensorDictModule(lambda x: x[..., 0].long() * 0, ["observation"], ["action"])
    assert len(data.evaluate(left, 2)) == 2
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError, match="out of luck"):
        make_trainer().fit(make_module(Failing), datamodule=data)
    assert children == [2]
    assert multiprocessing.active_children() == []


def test_closing_twice_and_before_anything_is_harmless(make_data):
    data = make_data()
    data.close()
    data.setup("fit")
    data.close()
    data.close()


SCRIPT = """
import multiprocessing, time
import lightning as L
from torchrl_lightning import AsynchronousCollector, OnPolicyDataModule
from datamodules.conftest import TinyActorCritic

class Module(TinyActorCritic):
    fails = False

    def training_step(self, batch, batch_idx):
        print("children", len(multiprocessing.active_children()), flush=True)
        if self.fails:
            raise RuntimeError("out of luck")
        time.sleep(0.1)
        return super().training_step(batch, batch_idx)

def collector(policy, seed):
    return AsynchronousCollector("CartPole-v1", policy, num_workers=1, num_envs=2, frames_per_batch=32, seed=seed)

def fit(module):
    data = OnPolicyDataModule("CartPole-v1", num_envs=2, frames_per_batch=32, mini_batch_size=16, collector=collector)
    L.Trainer(accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, limit_val_batches=0,
              enable_progress_bar=False, enable_model_summary=False).fit(module, datamodule=data)

if __name__ == "__main__":
    failing = Module()
    failing.fails = True
    try:
        fit(failing)
    except RuntimeError as error:
        print(error, len(multiprocessing.active_children()), flush=True)
    fit(Module())
"""


def members(session):
    """Processes of a session, by /proc: whoever outlives its leader is a leak."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[3] == str(session) and fields[0] != "Z":
            alive.append(int(stat.parent.name))
    return alive


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_no_worker_outlives_a_failed_or_interrupted_run(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    process = Forked(as_script(script), tmp_path, session=True)
    session = process.pid
    try:
        process.waits_for(lambda: process.said.count("children 1\n") == 2)
        assert "out of luck 0\n" in process.said  # the failed run has ended its worker
        assert len(members(session)) >= 2
        os.killpg(session, signal.SIGINT)
        assert process.ends() != 0
        deadline = time.monotonic() + 300
        while members(session) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert members(session) == []
    finally:
        for pid in members(session):
            os.kill(pid, signal.SIGKILL)
