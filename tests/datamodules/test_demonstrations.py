"""Runs replay demonstrations, learn from them and mine them; contract tests cover resumed runs."""

from __future__ import annotations

from functools import partial

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.collectors import Collector
from torchrl.envs import InitTracker, TransformedEnv

from kit.actor_critic import fit, rollouts
from kit.demonstrated_runs import CART_POLES, demonstrated, ppo, shown
from kit.forks import forked_workers
from kit.ranks import Report, fit_ranks, reports, run_ranks
from kit.runs import SaveAt, parameters
from torchrl_lightning import (
    AsynchronousCollector,
    DemonstrationActor,
    DemonstrationReplayTransform,
    FramesProgressBar,
    GymnasiumCollector,
    PPODBuffer,
)

READY = partial(SyncVectorEnv, [partial(gymnasium.make, "CartPole-v1")] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
SIZES = {"num_envs": 4, "frames_per_batch": 64}


def test_demonstrations_are_learned_from_mined_and_reported(human, tmp_path, capsys):
    settings = {"normalize_observation": True, "normalize_reward": True, "frames_per_batch": 256}
    data, bar = rollouts(buffer=demonstrated(human), **settings), FramesProgressBar(refresh_every=0)
    fit(tmp_path, data, ppo(), max_epochs=6, limit_val_batches=1, callbacks=[bar], enable_progress_bar=True)
    figures = data.metrics()
    assert figures["demos/D_R"] == 1.0
    assert figures["demos/D_V"] > 0
    assert 0 < figures["demos/replayed"] < 1
    assert figures["demos/threshold"] == 99.0
    assert not figures.get("demos/success")
    assert figures["train/return"] < 99.0  # the agent's own episodes
    mined = data.buffer.value_demos[0]
    assert mined.total_reward == mined.length  # neither observations nor rewards are normalised
    assert mined.steps["observation"].abs().max() < 5
    assert data.buffer.reward_demos[0].steps["observation"].equal(shown(7).steps["observation"])
    said = capsys.readouterr().err
    for name in ("D_R=1", "D_V=", "rho=0.5", "phi=0.3", "threshold=99", "replayed="):
        assert name in said


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, lambda: {"env": READY(), "eval_env": "CartPole-v1"}),
        ({}, lambda: {"env": CART_POLES}),
        ({"log_prob": "current"}, lambda: {"env": CART_POLES}),
        ({}, lambda: {"collector": partial(GymnasiumCollector, "CartPole-v1", **SIZES)}),
        ({}, lambda: {"collector": partial(AsynchronousCollector, "CartPole-v1", num_workers=2, **SIZES)}),
    ],
    ids=["a ready vector environment", "TorchRL's", "TorchRL's, current", "a collector of one's own", "workers"],
)
def test_rollouts_of_all_collectors_are_replayed_and_mined(options, settings, human, tmp_path):
    data = rollouts(buffer=demonstrated(human, **options), **settings())
    with forked_workers():
        fit(tmp_path, data, ppo(), max_epochs=4, limit_val_batches=1)
    assert 0 < data.metrics()["demos/replayed"] < 1
    assert data.buffer.value_demos


def test_torchrls_own_collector_replays_too(human, tmp_path):
    def collector(policy, replay):
        env = TransformedEnv(DemonstrationReplayTransform(replay).wrap(CART_POLES()), InitTracker(), auto_unwrap=False)
        return Collector(env, DemonstrationActor(policy), frames_per_batch=64, total_frames=-1, no_cuda_sync=True)

    data = rollouts(buffer=demonstrated(human, rho=1.0, phi=0.0), collector=collector)
    fit(tmp_path, data, ppo(), max_epochs=3)
    assert data.metrics()["demos/replayed"] == 1.0
    again = shown(7).steps["observation"].roll(-2 * 16 % 7, 0)  # two rollouts of 16 steps came before
    assert data.buffer.rollout["observation"][:7, 0].equal(again)


def test_collector_that_cannot_replay_is_refused(human, tmp_path):
    def collector(policy, seed):
        raise AssertionError

    data = rollouts(buffer=demonstrated(human), collector=collector)
    with pytest.raises(ValueError, match=r"collector= must .* `replay`.* PPODBuffer"):
        fit(tmp_path, data, ppo())


def met(module, data):
    return {
        "parameters": parameters(module).tolist(),
        "observations": data.buffer.rollout["observation"].sum().item(),
        "value": [(each.value, each.total_reward) for each in data.buffer.value_demos],
    }


def fits(folder, shared):
    def fit(name, saves=None, resume=None):
        files = {"save_demos_every": 1, "num_agent_demos_to_save": 1, "target_agent_demos_dir": str(folder / name)}
        demos = partial(PPODBuffer, rho=0.3, phi=0.4, shared_demos=shared, initial_reward_threshold=30.0, **files)
        sizes = {"num_envs": 2, "frames_per_batch": 128, "mini_batch_size": 64, "num_epochs": 1}
        data, report = rollouts(buffer=demos, reset_at_each_batch=True, **sizes), Report(folder, name, met)
        fit_ranks(ppo(), data, report, *saves or (), resume=resume, max_epochs=4)

    fit("whole", [SaveAt(folder / "half.ckpt", "on_train_epoch_end", 2, then="go on")])
    fit("resumed", resume=folder / "half.ckpt")


@pytest.fixture(scope="module", params=[False, True], ids=["separate", "shared"])
def two_ranks(request, tmp_path_factory):
    """Return whether demonstrations are shared, and the folder of a run on two ranks and its resumed run."""
    return request.param, run_ranks(fits, tmp_path_factory.mktemp("ranks"), request.param)


def test_two_ranks_mine(two_ranks):
    shared, folder = two_ranks
    first, second = reports(folder, "whole")
    assert first["parameters"] == second["parameters"]
    assert first["observations"] != second["observations"]
    assert first["value"]
    assert second["value"]
    assert (first["value"] == second["value"]) == shared
    files = sorted(path.name for path in (folder / "whole").glob("[!.]*"))
    assert files == (["reward_demo_1.safetensors"] if shared else ["rank_1", "reward_demo_1.safetensors"])


def test_two_ranks_resume_as_an_uninterrupted_run(two_ranks):
    _, folder = two_ranks
    for whole, resumed in zip(reports(folder, "whole"), reports(folder, "resumed"), strict=True):
        assert resumed["parameters"] == whole["parameters"]
        assert resumed["value"] == whole["value"]
