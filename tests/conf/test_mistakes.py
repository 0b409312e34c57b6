"""A wrong setting raises a one-line error that names the setting, before training starts."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping
from omegaconf import DictConfig, OmegaConf, open_dict

from torchrl_lightning.cli.config.instantiate import build_part, check_parts, trainer_errors
from torchrl_lightning.cli.config.validate import check_config
from torchrl_lightning.cli.error_messages import UsageError

REPLAY = "data=uniform model=dqn"
BRANCHED = "data=branched model=mbpo env=pendulum"


@pytest.fixture
def composed(compose_train):
    """Return a function that composes groups and adds a setting; groups with data drop the default experiment."""

    def with_setting(groups: str = "", setting: str = "") -> DictConfig:
        alone = ("~experiment", "data.total_frames=100") if "data=" in groups else ()
        cfg = compose_train(*alone, *groups.split())
        with open_dict(cfg):
            return OmegaConf.merge(cfg, OmegaConf.from_dotlist([setting] if setting else []))

    return with_setting


def build_all(cfg: DictConfig) -> None:
    """Check and build all parts like a run, except for the loggers."""
    check_config(cfg)
    data, model = build_part(cfg, "data"), build_part(cfg, "model")
    for name in cfg.callbacks:
        build_part(cfg, f"callbacks.{name}")
    build_part(cfg, "trainer", callbacks=[], logger=[])
    check_parts(cfg, data, model)


def refused(cfg: DictConfig) -> str:
    """Return the one-line error message for the wrong setting."""
    with pytest.raises(UsageError) as error:
        build_all(cfg)
    message = str(error.value)
    assert "\n" not in message
    return message


# groups: pairs of a setting and its error message
SETTINGS: dict[str, list[tuple[str, str]]] = {
    "": [
        ("data.num_envs=0", "data.num_envs=0: num_envs must be a positive integer, got 0."),
        ("data.buffer.gamma=1.5", "data.buffer.gamma=1.5: gamma must be between 0 and 1, got 1.5."),
        ("data.buffer.gae_lambda=-1", "data.buffer.gae_lambda=-1.0: gae_lambda must be between 0 and 1, got -1.0."),
        ("data.frames_per_batch=1001", "data.frames_per_batch=1001: frames_per_batch must be a multiple of num_e"),
        ("data.normalize_observation=[foo]", "data.normalize_observation=['foo']: normalize_observation must name"),
        ("data.normalize_clip=0", "data.normalize_clip=0.0: normalize_clip must be above 0, got 0.0."),
        ("data.env=Nope-v0", "data.env: Gymnasium does not know the environment 'Nope-v0'"),
        ("data.env=gymnasium:Nope-v0", "data.env: Gymnasium does not know the environment 'gymnasium:Nope-v0': Env"),
        (
            "data.env=Blackjack-v1",
            "data.env: The space of 'observation', Tuple(Discrete(32), Discrete(11), Discrete(2)), is not supported: "
            "expected Box",
        ),
        ("data.seed=${nowhere}", "data.seed: Interpolation key 'nowhere' not found"),
        ("data.total_frames=-1", "the run would never end; set data.total_frames=N"),
        ("model.clip_epsilon=-1", "model.clip_epsilon=-1.0: clip_epsilon must be above 0, got -1.0."),
        ("model.learning_rate=0", "model.learning_rate=0.0: learning_rate must be above 0, got 0.0."),
        ("model.max_grad_norm=-1", "model.max_grad_norm=-1.0: max_grad_norm must be above 0, got -1.0."),
        ("model.initial_std=0", "model.initial_std=0.0: initial_std must be above 0, got 0.0."),
        ("model.optimizer=Adam", "model.optimizer=Adam: optimizer must be a callable"),
        ("model.loss_critic_type=l3", "model.loss_critic_type=l3: loss_critic_type must be one of 'l1', 'l2',"),
        ("model.schedule=cubic", "model: A schedule must be one of constant, linear, cosine,"),
        (
            "model.network.hidden_sizes=[0]",
            "model.network: Each width in hidden_sizes=[0] must be a positive integer, got 0",
        ),
        ("model.network.activation=swash", "model.network.activation=swash: activation must be one of 'elu', 'gelu',"),
        ("trainer.precision=99", "trainer: Precision 99 is invalid."),
        ("trainer.max_epochs=-5", "trainer: `max_epochs` must be a non-negative integer or -1. You passed in -5."),
        ("callbacks.checkpoint.mode=best", "callbacks.checkpoint: `mode` can be min, max but got best"),
        ("seed=abc", "seed=abc: expected a whole number."),
        ("torch_threads=few", "torch_threads=few: expected a whole number."),
        ("eval_checkpoint=worst", "eval_checkpoint is 'worst'; expected 'best' or 'last'."),
    ],
    REPLAY: [
        ("data.buffer.gamma=2", "data.buffer.gamma=2.0: gamma must be between 0 and 1, got 2.0."),
        ("data.buffer.gamma=0.95", "data.buffer.gamma=0.95 of the buffer differs from gamma=0.99 of DQNM"),
        ("data.buffer.storage.max_size=0", "data.buffer.storage.max_size=0: max_size must be a positive integer"),
        ("data.buffer.storage.max_size=9", "data.buffer: max_size=9 must be a multiple of num_envs=8"),
        (
            "data.env=Pendulum-v1",
            "model: the action space of learners such as DQN must be Discrete, got Box of shape",
        ),
        ("data.frames_per_update=0", "data.frames_per_update=0.0: frames_per_update must be above 0, got 0.0."),
        ("model.gamma=2", "model.gamma=2.0: gamma must be between 0 and 1, got 2.0."),
        ("model.tau=2", "model.tau=2.0: tau must be above 0 and at most 1, got 2.0"),
    ],
    "data=episodic model=dqn": [
        ("data.buffer.sampler.recent_data_ratio=2", "data.buffer.sampler.recent_data_ratio=2.0: recent_data_ratio mu"),
    ],
    "data=frames model=dqn": [("", "data.buffer.storage.frame_stack=4 needs observations of stacked images")],
    "data=hindsight model=dqn": [
        ("", "data.buffer.transform.achieved_goal_key=achieved_goal: achieved_goal_key must"),
        (
            "data.buffer.transform.strategy=past",
            "data.buffer.transform.strategy=past: strategy must be one of 'future'",
        ),
    ],
    "env=recipe": [
        ("data.env.id=Nope-v0", "data.env: Gymnasium does not know the environment 'Nope-v0'"),
        ("data.env.frame_stack=2", "data.env.frame_stack=2 needs an image"),
        ("data.env.drop=[sight]", "data.env.drop=['sight'] needs a Dict"),
        (
            "data.env.rename={gamma: reward}",
            "data.env.rename={'gamma': 'reward'}: rename must not use the reserved names 'reward'",
        ),
    ],
    # Errors of the groups themselves.
    "+trainer.max_epoch=3": [("", "trainer: Trainer.__init__() got an unexpected keyword argument 'max_epoch'")],
    "model.learning_rate=???": [("", "the config has no value for model.learning_rate; set")],
    "model.network=gru": [("", "model.network is 'gru', expected a config; select it as model/network=gru.")],
    "model=default": [("", "model must have a class (_target_); select one with model=NAME")],
    "model=dqn": [
        ("", "DQNModule does not learn from the OnPolicyDataModule; choose a stream for it, such as data=uni")
    ],
    "data=uniform": [("", "PPOModule does not learn from the ReplayDataModule")],
    "data=model_based": [("", "PPOModule does not learn from the DynamicsDataModule")],
    "data=uniform model=pets env=pendulum": [
        ("", "DynamicsEnsemble does not learn from the ReplayDataModule; choose a stream for it, such as data=model"),
    ],
    "data=branched model=sac env=pendulum": [
        (
            "",
            "BranchedReplay needs a learner with fit_dynamics and imagine, got SACModule",
        ),
    ],
    "data=uniform model=mbpo env=pendulum": [
        ("", "the DataModule of MBPOModule must provide branches of its world model. Use data=branched"),
    ],
    BRANCHED: [
        ("data.source.real_ratio=1.5", "data.source.real_ratio=1.5: real_ratio must be above 0 and below 1, got 1.5"),
        ("data.buffer.n_steps=3", "data.source: n_steps of the buffer must be 1"),
    ],
}
CASES = [
    pytest.param(groups, setting, message, id=f"{groups}: {setting or message}")
    for groups, settings in SETTINGS.items()
    for setting, message in settings
]


@pytest.mark.parametrize(("groups", "setting", "message"), CASES)
def test_setting_that_does_not_fit_is_named(composed, groups, setting, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(composed(groups, setting)).startswith(message)


TRAINER = {
    "trainer.accumulate_grad_batches=2": "trainer.accumulate_grad_batches=2: accumulate_grad_batches must be 1, got 2",
    "trainer.gradient_clip_val=0.5": "trainer.gradient_clip_val=0.5: gradient_clip_val must be None, got 0.5",
    "trainer.overfit_batches=1": "trainer.overfit_batches=1: overfit_batches must be 0, got 1",
    "trainer.limit_train_batches=0.001": "trainer.limit_train_batches=0.001: limit_train_batches must be at least",
    "trainer.limit_val_batches=0.5": "trainer.limit_val_batches=0.5: limit_val_batches must be at least 1",
    "callbacks.own._target_=lightning.pytorch.callbacks.LearningRateFinder": "callbacks must not contain a LearningR",
}


@pytest.mark.parametrize(("setting", "message"), TRAINER.items())
def test_setting_of_the_trainer_without_effect_is_named(composed, setting, message):
    cfg = composed("", setting)
    data, model = build_part(cfg, "data"), build_part(cfg, "model")
    callbacks = [build_part(cfg, f"callbacks.{name}") for name in cfg.callbacks]
    with pytest.raises(UsageError) as error:
        check_parts(cfg, data, model, trainer=build_part(cfg, "trainer", callbacks=callbacks, logger=[]))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_error_of_the_trainer_in_a_fit_is_one_line(composed):
    with pytest.raises(UsageError, match=r"^trainer: .* that has no logger"), trainer_errors(composed()):
        raise MisconfigurationException("Cannot use a callback with a `Trainer` that has no logger.")


def test_metric_of_early_stopping_that_is_not_logged_is_one_line(composed):
    stop, run = EarlyStopping("nothing"), SimpleNamespace(fast_dev_run=False, callback_metrics={})
    message = r"^trainer: Early stopping .* `nothing` which is not available"
    with pytest.raises(UsageError, match=message), trainer_errors(composed()):
        stop._run_early_stopping_check(run)
    with pytest.raises(RuntimeError, match="another"), trainer_errors(composed()):
        raise RuntimeError("another")


def test_time_limit_of_another_type_is_one_line(composed):
    cfg = composed(setting="trainer.max_time=5")
    with pytest.raises(UsageError, match=r"^trainer: .*Set max_time=DD:HH:MM:SS"):
        build_part(cfg, "trainer", callbacks=[], logger=[])


def test_advantages_that_the_buffer_standardises_cannot_be_left_as_they_are(composed):
    cfg = composed(setting="model.normalize_advantage=false")
    cfg.data.buffer.standardize_advantages = True
    assert refused(cfg).startswith(
        "model.normalize_advantage=False: normalize_advantage must not be False, because GAEBuffer"
    )


class Images(gym.ObservationWrapper):
    """A wrapper that returns black images as observations."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return np.zeros((84, 84), np.uint8)


def test_storage_of_frames_wants_stacks_of_its_own_size(composed):
    groups = "data=frames env=recipe model=dqn model/network=cnn"
    cfg = composed(groups, "data.env.wrappers=[{_target_: conf.test_mistakes.Images}]")
    cfg.data.env.frame_stack = 4
    build_all(cfg)
    cfg.data.env.frame_stack = 8
    assert refused(cfg) == "data.buffer.storage.frame_stack=4 must equal data.env.frame_stack=8."


@pytest.mark.parametrize("groups", ["", REPLAY])
def test_what_fits_is_built_for_a_trial_without_moving_the_runs_generator(composed, groups):
    cfg = composed(groups)
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


def test_fault_of_the_program_keeps_its_traceback(composed, monkeypatch):
    def broken(self, *args, **kwargs):
        raise AttributeError("nothing to do with a setting")

    monkeypatch.setattr("torchrl_lightning.callbacks.frames_bar.FramesProgressBar.__init__", broken)
    with pytest.raises(Exception, match="nothing to do with a setting") as error:
        build_part(composed(), "callbacks.progress_bar")
    assert not isinstance(error.value, UsageError)
