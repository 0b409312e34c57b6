"""A setting that does not fit is named in one line, before anything of the run is built."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from torchrl_lightning.cli.checks import UsageError, check_config
from torchrl_lightning.cli.parts import build_part, check_parts

BRANCHED = ("~experiment", "data=branched", "model=mbpo", "env=pendulum", "data.total_frames=100")
REPLAY = ("~experiment", "data=uniform", "model=dqn", "data.total_frames=100")
COMPOSED: dict[tuple[str, ...], DictConfig] = {}


@pytest.fixture
def composed(compose_train):
    """Compose once for all settings that are tried; give a copy with one more."""

    def with_setting(*base: str, setting: str = "") -> DictConfig:
        if base not in COMPOSED:
            COMPOSED[base] = compose_train(*base)
        cfg = copy.deepcopy(COMPOSED[base])
        with open_dict(cfg):
            return OmegaConf.merge(cfg, OmegaConf.from_dotlist([setting] if setting else []))

    return with_setting


def build_all(cfg: DictConfig) -> None:
    """Build all parts as a run does, but for loggers."""
    check_config(cfg)
    data, model = build_part(cfg, "data"), build_part(cfg, "model")
    for name in cfg.callbacks:
        build_part(cfg, f"callbacks.{name}")
    build_part(cfg, "trainer", callbacks=[], logger=[])
    check_parts(cfg, data, model)


def refused(cfg: DictConfig) -> str:
    """Give what is said about the setting that does not fit."""
    with pytest.raises(UsageError) as error:
        build_all(cfg)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.num_envs=0", "data.num_envs=0: num_envs must be a positive integer, got 0."),
        ("data.buffer.gamma=1.5", "data.buffer.gamma=1.5: gamma must be between 0 and 1, got 1.5."),
        ("data.buffer.gae_lambda=-1", "data.buffer.gae_lambda=-1.0: gae_lambda must be between 0 and 1, got -1.0."),
        ("model.clip_epsilon=-1", "model.clip_epsilon=-1.0: clip_epsilon must be above 0, got -1.0."),
        ("model.learning_rate=0", "model.learning_rate=0.0: learning_rate must be above 0, got 0.0."),
        ("model.max_grad_norm=-1", "model.max_grad_norm=-1.0: max_grad_norm must be above 0, got -1.0."),
        ("model.initial_std=0", "model.initial_std=0.0: initial_std must be above 0, got 0.0."),
        ("model.optimizer=Adam", "model.optimizer=Adam: optimizer is 'Adam'; expected a callable"),
        ("model.loss_critic_type=l3", "model.loss_critic_type=l3: loss_critic_type must be one of 'l1', 'l2',"),
        ("model.schedule=cubic", "model: unknown schedule 'cubic'; known are constant, linear, cosine"),
        ("model.network.hidden_sizes=[0]", "model: hidden_sizes is [0]; every layer must have at least 1 unit."),
        ("model.network.activation=swash", "model: activation must be one of 'elu', 'gelu',"),
        ("trainer.precision=99", "trainer: Precision 99 is invalid."),
        ("trainer.max_epochs=-5", "trainer: `max_epochs` must be a non-negative integer or -1. You passed in -5."),
        ("callbacks.checkpoint.mode=best", "callbacks.checkpoint: `mode` can be min, max but got best"),
        ("seed=abc", "seed=abc: expected a whole number."),
        ("torch_threads=few", "torch_threads=few: expected a whole number."),
        ("data.seed=${nowhere}", "data.seed: Interpolation key 'nowhere' not found"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(composed, override, message):
    assert refused(composed(setting=override)).startswith(message)


def test_advantages_that_the_buffer_standardises_cannot_be_left_as_they_are(composed):
    cfg = composed(setting="model.normalize_advantage=false")
    cfg.data.buffer.standardize_advantages = True
    assert refused(cfg).startswith("model.normalize_advantage=False: normalize_advantage=False, but GAEBuffer has")


def test_an_argument_that_does_not_exist_is_named(compose_train):
    message = refused(compose_train("+trainer.max_epoch=3"))
    assert message == "trainer: Trainer.__init__() got an unexpected keyword argument 'max_epoch'"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.buffer.gamma=2", "data.buffer.gamma=2.0: gamma must be between 0 and 1, got 2.0."),
        (
            "data.buffer.gamma=0.95",
            "data.buffer.gamma=0.95: gamma=0.95 of the buffer differs from gamma=0.99 of DQNModule, which owns",
        ),
        ("data.frames_per_update=0", "data.frames_per_update=0.0: frames_per_update must be above 0, got 0.0."),
        ("data.buffer.storage.max_size=0", "data.buffer.storage.max_size=0: max_size must be a positive integer"),
        ("data.buffer.storage.max_size=9", "data.buffer: max_size=9 is not a multiple of num_envs=8"),
        ("model.gamma=2", "model.gamma=2.0: gamma must be between 0 and 1, got 2.0."),
        ("model.tau=2", "model.tau=2.0: tau=2.0 must be in (0, 1]"),
    ],
)
def test_a_setting_of_replay_that_does_not_fit_is_named(composed, override, message):
    assert refused(composed(*REPLAY, setting=override)).startswith(message)


@pytest.mark.parametrize(
    ("stream", "override", "message"),
    [
        (
            "episodic",
            "data.buffer.sampler.recent_data_ratio=2",
            "data.buffer.sampler.recent_data_ratio=2.0: recent_data_ratio must be between 0 and 1, got 2.0.",
        ),
        (
            "frames",
            "",
            "data.buffer.storage.frame_stack=4: frame_stack=4 keeps stacks of images, but the environment observes [4]",
        ),
        (
            "hindsight",
            "",
            "data.buffer.transform.achieved_goal_key=achieved_goal: achieved_goal_key names nothing that",
        ),
    ],
)
def test_a_setting_of_episodic_replay_that_does_not_fit_is_named(composed, stream, override, message):
    base = ("~experiment", f"data={stream}", "model=dqn", "data.total_frames=100")
    assert refused(composed(*base, setting=override)).startswith(message)


class Images(gym.ObservationWrapper):
    """Shows black images."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return np.zeros((84, 84), np.uint8)


def test_a_storage_of_frames_wants_stacks_of_its_own_size(composed):
    base = ("~experiment", "data=frames", "env=recipe", "model=dqn", "model/network=cnn", "data.total_frames=100")
    images = "data.env.wrappers=[{_target_: conf.test_mistakes.Images}]"
    cfg = composed(*base, setting=images)
    cfg.data.env.frame_stack = 4
    build_all(cfg)
    cfg.data.env.frame_stack = 8
    assert refused(cfg) == (
        "data.buffer.storage.frame_stack=4: frame_stack=4 differs from data.env.frame_stack=8; give both the same."
    )


def test_an_unsupported_observation_is_named_with_what_is_supported(composed):
    message = refused(composed(setting="data.env=Blackjack-v1"))
    assert "'observation', Tuple(Discrete(32), Discrete(11), Discrete(2)), is not supported: expected Box" in message


def test_an_unsupported_action_is_named_with_what_is_supported(composed):
    message = refused(composed(*REPLAY, setting="data.env=Pendulum-v1"))
    assert message.startswith("model: DQN needs one choice among several actions (Discrete), got Box of shape")


@pytest.mark.parametrize("base", [(), REPLAY])
def test_what_fits_is_built_for_a_trial_without_moving_the_runs_generator(composed, base):
    cfg = composed(*base)
    drawn = []
    for trial in (False, True):
        torch.manual_seed(0)
        data, model = build_part(cfg, "data"), build_part(cfg, "model")
        if trial:
            check_parts(cfg, data, model)
        assert not model.is_built
        data.setup("fit")
        drawn.append((torch.rand(3), torch.rand(3, generator=data.buffer.generator)))
        data.close()
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


def test_a_fault_of_the_program_keeps_its_traceback(composed, monkeypatch):
    def broken(self, *args, **kwargs):
        raise AttributeError("nothing to do with a setting")

    monkeypatch.setattr("torchrl_lightning.callbacks.frames_bar.FramesProgressBar.__init__", broken)
    with pytest.raises(Exception, match="nothing to do with a setting") as error:
        build_part(composed(), "callbacks.progress_bar")
    assert not isinstance(error.value, UsageError)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (
            ("model=dqn",),
            "DQNModule does not learn from the OnPolicyDataModule; choose a stream for it, such as data=uniform",
        ),
        (
            ("~experiment", "data=uniform", "data.total_frames=100"),
            "PPOModule does not learn from the ReplayDataModule",
        ),
        (
            ("~experiment", "data=model_based", "data.total_frames=100"),
            "PPOModule does not learn from the DynamicsDataModule",
        ),
        (
            ("~experiment", "data=uniform", "model=pets", "env=pendulum", "data.total_frames=100"),
            "DynamicsEnsemble does not learn from the ReplayDataModule; choose a stream for it, such as data=model",
        ),
        (
            ("~experiment", "data=branched", "model=sac", "env=pendulum", "data.total_frames=100"),
            "SACModule imagines no branches for BranchedReplay; choose a learner that does, such as model=mbpo",
        ),
        (
            ("~experiment", "data=uniform", "model=mbpo", "env=pendulum", "data.total_frames=100"),
            "MBPOModule learns from the branches that it imagines; choose a stream with them, such as data=branched",
        ),
        (
            (*BRANCHED, "data.source.real_ratio=1.5"),
            "data.source.real_ratio=1.5: real_ratio must be above 0 and below 1, got 1.5",
        ),
        ((*BRANCHED, "data.buffer.n_steps=3"), "data.source: branches are imagined step by step, but the buffer has"),
    ],
    ids=["replay", "on-policy", "policy over dynamics", "dynamics", "no branches", "branches", "ratio", "steps"],
)
def test_a_learner_over_the_other_stream_is_refused(composed, base, message):
    assert refused(composed(*base)).startswith(message)
