from __future__ import annotations

from functools import partial

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lightning.pytorch.callbacks import ModelCheckpoint
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv

from datamodules.replay_parts import reports, run_ranks
from kit.runs import parameters
from torchrl_lightning import (
    AsynchronousCollector,
    Demonstration,
    DemonstrationActor,
    DemonstrationReplayTransform,
    FramesProgressBar,
    GymnasiumCollector,
    PPODBuffer,
    write_demonstration,
)
from torchrl_lightning.learn import MLPNetwork, PPOModule, RecurrentNetwork

# A resumed run writes beside the checkpoint that it came from.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

CART_POLES = partial(SerialEnv, 4, partial(GymEnv, "CartPole-v1", categorical_action_encoding=True))


def shown(length=5, **options):
    """A demonstration that fits CartPole."""
    steps = TensorDict({"observation": torch.randn(length, 4, generator=torch.Generator().manual_seed(0))}, [length])
    steps["action"], steps["next", "reward"] = torch.arange(length) % 2, torch.zeros(length, 1)
    steps["next", "reward"][-1] = 99.0
    return Demonstration(steps, **options)


@pytest.fixture
def human(tmp_path):
    (tmp_path / "human").mkdir()
    write_demonstration(tmp_path / "human" / "shown.safetensors", shown(7))
    return str(tmp_path / "human")


def buffer(human, **options):
    return partial(PPODBuffer, initial_human_demos_dir=human, **{"rho": 0.5, "phi": 0.3, **options})


def ppo(recurrent=False, seed=0):
    torch.manual_seed(seed)
    return PPOModule(RecurrentNetwork("gru", 8) if recurrent else MLPNetwork([8]))


def test_demonstrations_are_learned_from_and_mined(human, make_data, make_trainer):
    settings = {"normalize_observation": True, "normalize_reward": True, "frames_per_batch": 256}
    data = make_data(buffer=buffer(human), **settings)
    make_trainer(max_epochs=6, limit_val_batches=1).fit(ppo(), datamodule=data)
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


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("stopped_after", [1, 2])
def test_a_run_that_only_replays_resumes_bit_for_bit(
    recurrent, stopped_after, human, tmp_path, make_data, make_trainer
):
    # No state of an environment is lost where each of them rests; demonstrations of 7 steps play across rollouts of 16.
    settings = {"buffer": buffer(human, rho=1.0, phi=0.0, log_prob="current"), "mini_batch_size": None}
    whole, options = ppo(recurrent), {"limit_val_batches": 1}
    make_trainer(max_epochs=4, **options).fit(whole, datamodule=make_data(**settings))

    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True, filename="at")
    kept = {**options, "enable_checkpointing": True, "callbacks": [checkpoint]}
    half = make_data(**settings)
    make_trainer(max_epochs=stopped_after, **kept).fit(ppo(recurrent), datamodule=half)
    assert half.buffer.replay.playing.all()
    resumed, data = ppo(recurrent, seed=9), make_data(**settings)
    make_trainer(max_epochs=4, **kept).fit(resumed, datamodule=data, ckpt_path=checkpoint.last_model_path)
    assert torch.equal(parameters(resumed), parameters(whole))
    assert data.metrics()["demos/replayed"] == 1.0


@pytest.mark.parametrize("env", [{}, {"env": CART_POLES}])
def test_a_resumed_run_repeats_an_uninterrupted_one_with_seeded_resets(env, human, tmp_path, make_data, make_trainer):
    settings = {"buffer": buffer(human), "reset_at_each_batch": True, **env}
    whole, options = ppo(), {"limit_val_batches": 1}
    uninterrupted = make_data(**settings)
    make_trainer(max_epochs=5, **options).fit(whole, datamodule=uninterrupted)
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True, filename="at")
    kept = {**options, "enable_checkpointing": True, "callbacks": [checkpoint]}
    make_trainer(max_epochs=2, **kept).fit(ppo(), datamodule=make_data(**settings))
    resumed, data = ppo(seed=9), make_data(**settings)
    make_trainer(max_epochs=5, **kept).fit(resumed, datamodule=data, ckpt_path=checkpoint.last_model_path)
    assert torch.equal(parameters(resumed), parameters(whole))
    assert [each.value for each in data.buffer.value_demos] == [each.value for each in uninterrupted.buffer.value_demos]
    assert data.buffer.value_demos


def test_a_ready_vector_environment_replays_too(human, make_data, make_trainer):
    make = partial(gymnasium.make, "CartPole-v1")
    env = SyncVectorEnv([make] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
    data = make_data(env=env, eval_env="CartPole-v1", buffer=buffer(human))
    make_trainer(max_epochs=4, limit_val_batches=1).fit(ppo(), datamodule=data)
    assert 0 < data.metrics()["demos/replayed"] < 1
    env.close()


def test_torchrls_own_collector_replays_too(human, make_data, make_trainer):
    def collector(policy, replay):
        env = SerialEnv(4, partial(GymEnv, "CartPole-v1", categorical_action_encoding=True))
        env = TransformedEnv(DemonstrationReplayTransform(replay).wrap(env), InitTracker(), auto_unwrap=False)
        return Collector(env, DemonstrationActor(policy), frames_per_batch=64, total_frames=-1, no_cuda_sync=True)

    data = make_data(buffer=buffer(human, rho=1.0, phi=0.0), collector=collector)
    make_trainer(max_epochs=3, limit_val_batches=0).fit(ppo(), datamodule=data)
    assert data.metrics()["demos/replayed"] == 1.0
    again = shown(7).steps["observation"].roll(-2 * 16 % 7, 0)  # two rollouts of 16 steps came before
    assert data.buffer.rollout["observation"][:7, 0].equal(again)


@pytest.mark.parametrize("log_prob", ["deterministic", "current"])
def test_environments_of_torchrl_replay_too(log_prob, human, make_data, make_trainer):
    data = make_data(env=CART_POLES, buffer=buffer(human, log_prob=log_prob))
    make_trainer(max_epochs=4, limit_val_batches=1).fit(ppo(), datamodule=data)
    assert 0 < data.metrics()["demos/replayed"] < 1
    assert data.buffer.value_demos


def test_workers_replay_and_are_mined(human, make_data, make_trainer):
    collector = partial(AsynchronousCollector, "CartPole-v1", num_workers=2, num_envs=4, frames_per_batch=64)
    data = make_data(buffer=buffer(human), collector=collector)
    make_trainer(max_epochs=5, limit_val_batches=0).fit(ppo(), datamodule=data)
    assert data.metrics()["demos/D_V"] > 0


def test_a_collector_that_cannot_replay_is_refused(human, make_data, make_trainer):
    def collector(policy, seed):
        raise AssertionError

    data = make_data(buffer=buffer(human), collector=collector)
    with pytest.raises(ValueError, match="PPODBuffer replays demonstrations, but collector= takes no `replay`"):
        make_trainer(max_epochs=1, limit_val_batches=0).fit(ppo(), datamodule=data)


def test_a_collector_of_ones_own_is_handed_the_replay(human, make_data, make_trainer):
    collector = partial(GymnasiumCollector, "CartPole-v1", num_envs=4, frames_per_batch=64)
    data = make_data(buffer=buffer(human, rho=1.0, phi=0.0), collector=collector)
    make_trainer(max_epochs=1, limit_val_batches=0).fit(ppo(), datamodule=data)
    assert data.metrics()["demos/replayed"] == 1.0


def test_the_progress_bar_shows_the_demonstrations(human, make_data, make_trainer, capsys):
    bar = FramesProgressBar(refresh_every=0)
    data = make_data(buffer=buffer(human))
    make_trainer(max_epochs=3, limit_val_batches=0, callbacks=[bar], enable_progress_bar=True).fit(
        ppo(), datamodule=data
    )
    shown = capsys.readouterr().err
    for name in ("D_R=1", "D_V=", "rho=0.5", "phi=0.3", "threshold=99", "replayed="):
        assert name in shown


@pytest.fixture(scope="module", params=[False, True])
def two_ranks(request, tmp_path_factory):
    """Whether demonstrations are shared, and the folder of a run on two ranks and of its resumption."""
    name = "shared" if request.param else "separate"
    return request.param, run_ranks("ppod_ddp_run.py", tmp_path_factory.mktemp(name), name)


def test_each_of_two_ranks_mines(two_ranks):
    shared, folder = two_ranks
    first, second = reports(folder, "whole")
    assert first["parameters"] == second["parameters"]
    assert first["observations"] != second["observations"]
    assert first["value"]
    assert second["value"]
    assert (first["value"] == second["value"]) == shared
    assert first["saved"] == (["reward_demo_1.safetensors"] if shared else ["rank_1", "reward_demo_1.safetensors"])


def test_two_ranks_go_on_as_if_never_stopped(two_ranks):
    _, folder = two_ranks
    for whole, resumed in zip(reports(folder, "whole"), reports(folder, "resumed"), strict=True):
        assert resumed["parameters"] == whole["parameters"]
        assert resumed["value"] == whole["value"]
