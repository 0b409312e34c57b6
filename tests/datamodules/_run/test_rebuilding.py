"""A checkpoint stores the plain settings of its DataModule; a DataModule rebuilt from them continues the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf

from kit.actor_critic import TinyActorCritic, rollouts
from kit.dynamics import model_data
from kit.replay import BUFFERS, dqn, replay_data
from kit.runs import parameters, trainer
from kit.states import differences
from torchrl_lightning import (
    DynamicsDataModule,
    EnvironmentRecipe,
    ExperienceBuffer,
    GAEBuffer,
    MBReplayBuffer,
    OnPolicyDataModule,
    ReplayDataModule,
)
from torchrl_lightning._core.trust import check_config
from torchrl_lightning.agents import CrossEntropyPlanner, DynamicsEnsemble

KEY = "datamodule_hyper_parameters"
EXACT = {"reset_at_each_batch": True, "updates_per_step": 1}


def planning(**settings: Any) -> tuple[Any, Any]:
    planner = partial(CrossEntropyPlanner, horizon=2, candidates=8, elites=2, iterations=2)
    return DynamicsEnsemble([8], planner=planner, num_elites=2), model_data(**settings)


def on_policy(**settings: Any) -> tuple[Any, Any]:
    return TinyActorCritic(), rollouts(**EXACT, **settings)


def replay(buffer: str = "prioritized, three steps", **settings: Any) -> tuple[Any, Any]:
    return dqn(), replay_data(buffer, frames_per_batch=8, **EXACT, **settings)


CARTPOLE = {"env": "CartPole-v1"}
REPLAY = {**CARTPOLE, "buffer": BUFFERS["prioritized, three steps"]}
# For each run: a function that builds module and data, and the arguments that a checkpoint does not store.
RUNS: dict[str, tuple[Callable[[], tuple[Any, Any]], dict[str, Any]]] = {
    "rollouts": (on_policy, CARTPOLE),
    "rollouts, normalised": (
        partial(on_policy, normalize_observation=("observation",), normalize_reward=True),
        CARTPOLE,
    ),
    "rollouts of another buffer": (
        partial(on_policy, buffer=partial(GAEBuffer, gae_lambda=0.5)),
        {**CARTPOLE, "buffer": partial(GAEBuffer, gae_lambda=0.5)},
    ),
    "rollouts without a seed": (partial(on_policy, seed=None), CARTPOLE),
    "rollouts of a recipe": (
        partial(on_policy, env=EnvironmentRecipe("CartPole-v1", time_limit=9)),
        {"env": EnvironmentRecipe("CartPole-v1", time_limit=9)},
    ),
    "replay": (replay, REPLAY),
    "replay, normalised": (partial(replay, normalize_observation=True, normalize_reward=True), REPLAY),
    "replay, beside": (partial(replay, checkpoint_buffer="beside"), REPLAY),
    "fits": (planning, {"env": "Pendulum-v1", "buffer": partial(MBReplayBuffer, 1000)}),
}
KINDS = {"rollouts": OnPolicyDataModule, "replay": ReplayDataModule, "fits": DynamicsDataModule}
EACH = pytest.mark.parametrize("name", RUNS)


def kind_of(name: str) -> Any:
    return next(kind for word, kind in KINDS.items() if name.startswith(word))


def fitted(folder: Path, name: str, epochs: int = 1, resume: Path | None = None) -> tuple[Any, Any, L.Trainer]:
    torch.manual_seed(0)
    module, data = RUNS[name][0]()
    run = trainer(folder, max_epochs=epochs, limit_val_batches=0)
    run.fit(module, datamodule=data, ckpt_path=resume)
    return module, data, run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains a run once for one epoch, and returns its folder."""

    @cache
    def folder(name: str) -> Path:
        made = tmp_path_factory.mktemp("runs")
        fitted(made, name)[-1].save_checkpoint(made / "at.ckpt")
        return made

    return folder


@pytest.fixture
def saved(runs: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies the folder of a run, and returns the copied checkpoint."""
    return lambda name: shutil.copytree(runs(name), tmp_path / "saved", dirs_exist_ok=True) / "at.ckpt"


def is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(is_plain, value.values()))
    return all(map(is_plain, value)) if type(value) is list else value is None or type(value) in (bool, int, float, str)


# ---------------------------------------------------------------------- hparams


@EACH
def test_hparams_contain_only_the_plain_settings(name: str) -> None:
    _, data = RUNS[name][0]()
    hparams = dict(data.hparams)
    assert is_plain(hparams)
    assert not {"env", "eval_env", "buffer", "buffer_dir", "dataset"} & set(hparams)
    assert hparams["num_envs"] == data.num_envs
    assert hparams["eval_episodes"] == data.eval_episodes
    check_config(hparams, where="its settings")
    assert data.hparams_initial == data.hparams


def test_hparams_are_the_original_arguments() -> None:
    sizes = {"total_frames": 1e3, "mini_batch_size": np.int64(32), "seed": None}
    data = rollouts(**sizes, normalize_observation=True, normalize_clip=np.float64(3))
    given = {"total_frames": 1000, "mini_batch_size": 32, "num_mini_batch": None, "normalize_clip": 3.0, "seed": None}
    assert {name: data.hparams[name] for name in given} == given
    data = replay_data(write_back=("a", ("next", "b")), collector=print)
    assert data.hparams["write_back"] == ["a", ["next", "b"]]
    assert data.write_back == ("a", ("next", "b"))
    assert "collector" not in data.hparams
    assert data.hparams["frames_per_batch"] is None


def test_setting_is_read_from_the_attribute_and_not_from_hparams(tmp_path: Path) -> None:
    module, data = replay()
    data.hparams.clear()
    trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(module, datamodule=data)
    assert data.updates == 10


class Seeded(TinyActorCritic):
    """A module with a hyperparameter that the DataModule also has."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_module_values_are_logged_once(tmp_path: Path) -> None:
    data = rollouts(seed=0)
    run = trainer(tmp_path, max_epochs=1, limit_val_batches=0, logger=CSVLogger(tmp_path))
    run.fit(Seeded(), datamodule=data)
    run.save_checkpoint(tmp_path / "at.ckpt")
    stored = torch.load(tmp_path / "at.ckpt", weights_only=True)
    assert stored["hyper_parameters"] == {"seed": 5}
    assert stored[KEY] == dict(data.hparams)


# ---------------------------------------------------------------------- rebuilt


@EACH
def test_rebuilt_datamodule_has_the_settings_and_the_state_of_the_run(name: str, saved: Callable[[str], Path]) -> None:
    path = saved(name)
    _, original = RUNS[name][0]()
    rebuilt = kind_of(name).load_from_checkpoint(path, **RUNS[name][1], **folder_of(name, path))
    assert rebuilt.hparams == original.hparams
    stored = torch.load(path, weights_only=True)[type(rebuilt).__qualname__]
    assert not differences(rebuilt.state_dict(), stored)
    assert rebuilt.frames == stored["ranks"][0]["frames"] > 0
    rebuilt.setup("fit")
    again = rebuilt.state_dict()
    for state in (again, stored):
        for name in ("place", "pass_of", "snapshot"):  # they change with the epoch and the save
            state["ranks"][0].pop(name, None)
        state.pop("to_give")
    assert not differences(again, stored)
    rebuilt.close()


@EACH
def test_resumed_run_of_a_rebuilt_datamodule_equals_an_uninterrupted_one(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    path = saved(name)
    whole, data, _ = fitted(tmp_path, name, 3)
    rebuilt = kind_of(name).load_from_checkpoint(path, **RUNS[name][1], **folder_of(name, path))
    torch.manual_seed(9)
    module, _ = RUNS[name][0]()
    trainer(tmp_path, max_epochs=3, limit_val_batches=0).fit(module, datamodule=rebuilt, ckpt_path=path)
    if name != "rollouts without a seed":  # the second run draws another seed
        assert torch.equal(parameters(module), parameters(whole))
        assert rebuilt.frames == data.frames
    assert rebuilt.seed == torch.load(path, weights_only=True)[type(rebuilt).__qualname__]["seed"]


def folder_of(name: str, path: Path) -> dict[str, Any]:
    """Return the ``buffer_dir`` of runs that store the buffer beside the checkpoint."""
    return {"buffer_dir": path.parent / "buffer"} if "beside" in name else {}


class Recording(L.Callback):
    """A callback that stores the training batches."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch.clone())


@pytest.mark.parametrize("name", ["rollouts", "rollouts, normalised", "replay", "replay, normalised", "fits"])
def test_rebuilt_datamodule_serves_the_next_batch_of_the_run_to_another_trainer(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    path, shown = saved(name), (Recording(), Recording())
    torch.manual_seed(0)
    module, data = RUNS[name][0]()
    trainer(tmp_path, max_epochs=2, limit_val_batches=0, callbacks=[shown[0]]).fit(module, datamodule=data)
    stored = torch.load(path, weights_only=True)
    learned = stored["global_step"]
    torch.manual_seed(9)
    module, _ = RUNS[name][0]()
    rebuilt = kind_of(name).load_from_checkpoint(path, **RUNS[name][1])
    module.on_fit_start = lambda: module.load_state_dict(stored["state_dict"])
    trainer(tmp_path, max_epochs=1, limit_val_batches=0, callbacks=[shown[1]]).fit(module, datamodule=rebuilt)
    expected, found = shown[0].batches[learned:], shown[1].batches
    assert (expected[0] == found[0]).all()


# ---------------------------------------------------------------------- arguments


def test_passed_arguments_replace_the_arguments_of_the_checkpoint(saved: Callable[[str], Path]) -> None:
    rebuilt = ReplayDataModule.load_from_checkpoint(saved("replay"), **REPLAY, batch_size=4, eval_episodes=7)
    assert (rebuilt.batch_size, rebuilt.eval_episodes, rebuilt.updates_per_epoch) == (4, 7, 10)
    assert (rebuilt.hparams.batch_size, rebuilt.hparams.eval_episodes) == (4, 7)


def test_hparams_file_replaces_the_settings_of_the_checkpoint(saved: Callable[[str], Path], tmp_path: Path) -> None:
    path = saved("replay")
    stored = torch.load(path, weights_only=True)[ReplayDataModule.CHECKPOINT_HYPER_PARAMS_KEY]
    (tmp_path / "hparams.yaml").write_text(OmegaConf.to_yaml({**stored, "batch_size": 4, "eval_episodes": 7}))
    rebuilt = ReplayDataModule.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml", **REPLAY)
    assert (rebuilt.batch_size, rebuilt.eval_episodes) == (4, 7)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "must be a regular file, but is a FIFO"),
        ("a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)), "values"),
    ],
)
def test_hparams_file_is_read_within_limits(
    content: str | None, says: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    path, file = saved("rollouts"), tmp_path / "hparams.yaml"
    os.mkfifo(file) if content is None else file.write_text(content)
    with pytest.raises(ValueError, match=says) as raised:
        OnPolicyDataModule.load_from_checkpoint(path, hparams_file=file, **CARTPOLE)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("rollouts", {}, "^OnPolicyDataModule.load_from_checkpoint needs env=: [^\n]*$"),
        ("replay", {}, "^ReplayDataModule.load_from_checkpoint needs env=, buffer=: [^\n]*$"),
        ("replay", CARTPOLE, "needs buffer=: "),
        ("rollouts of another buffer", CARTPOLE, "needs buffer=: "),
        ("fits", {"env": "Pendulum-v1"}, "^DynamicsDataModule.load_from_checkpoint needs buffer=: [^\n]*$"),
        ("rollouts", {**CARTPOLE, "num_env": 3}, "^OnPolicyDataModule has no setting 'num_env'; did you mean num_envs"),
    ],
)
def test_argument_that_is_missing_or_unknown_is_named(
    name: str, given: dict[str, Any], says: str, saved: Callable[[str], Path]
) -> None:
    with pytest.raises(TypeError, match=says):
        kind_of(name).load_from_checkpoint(saved(name), **given)


def test_another_environment_is_refused_before_the_state_changes(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"CartPole-v1.*Acrobot-v1"):
        OnPolicyDataModule.load_from_checkpoint(saved("rollouts"), env="Acrobot-v1")


def test_another_buffer_is_refused_when_it_is_built(saved: Callable[[str], Path]) -> None:
    rebuilt = ReplayDataModule.load_from_checkpoint(saved("replay"), env="CartPole-v1", buffer=BUFFERS["uniform"])
    with pytest.raises(ValueError, match=r"sampler='PrioritizedSampler'.*sampler='UniformSampler'"):
        rebuilt.setup("fit")
    rebuilt.close()


def test_checkpoint_of_another_datamodule_is_refused(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="ReplayDataModule"):
        ReplayDataModule.load_from_checkpoint(saved("rollouts"), **REPLAY)


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    stored = torch.load(path, weights_only=True)
    change(stored)
    torch.save(stored, path)
    return path


def test_checkpoint_of_an_earlier_release_has_no_settings_and_is_loaded(saved: Callable[[str], Path]) -> None:
    def forget(stored: dict[str, Any]) -> None:
        for key in [key for key in stored if key.startswith("datamodule_h")]:
            del stored[key]
        for key in ("to_give", "seed"):
            del stored["OnPolicyDataModule"][key]

    path = edited(saved("rollouts"), forget)
    sizes = {"num_envs": 4, "frames_per_batch": 64, "mini_batch_size": 32, "num_epochs": 2, "eval_episodes": 2}
    rebuilt = OnPolicyDataModule.load_from_checkpoint(path, **CARTPOLE, **sizes, **EXACT, seed=0)
    assert rebuilt.frames == 64
    with pytest.raises(ValueError, match=r"num_envs=4.*num_envs=8"):
        OnPolicyDataModule.load_from_checkpoint(path, **CARTPOLE)


def test_checkpoint_cannot_name_environments_or_folders(saved: Callable[[str], Path]) -> None:
    hostile = {"env": "antigravity:Env-v0", "eval_env": "antigravity:Env-v0", "buffer_dir": "/etc", "dataset": "/etc"}
    path = edited(saved("replay"), lambda stored: stored[KEY].update(hostile))
    rebuilt = ReplayDataModule.load_from_checkpoint(path, **REPLAY)
    assert (rebuilt.env, rebuilt.eval_env, rebuilt.buffer_dir, rebuilt.dataset) == (
        "CartPole-v1",
        "CartPole-v1",
        None,
        None,
    )
    path = edited(path, lambda stored: stored[KEY].update(eval_mode="${oc.env:HOME}"))
    with pytest.raises(ValueError, match="eval_mode="):
        ReplayDataModule.load_from_checkpoint(path, **REPLAY)


# ---------------------------------------------------------------------- subclasses of users


class Harder(OnPolicyDataModule):
    """A DataModule of a user that adds a setting as a field."""

    difficulty: int = 1


class Named(OnPolicyDataModule):
    """A DataModule of a user; its constructor does not accept other arguments."""

    def __init__(self, env: Any, difficulty: int = 1, *, shape: Callable[[float], float] | None = None) -> None:
        super().__init__(env, num_envs=4, frames_per_batch=64, mini_batch_size=32, seed=difficulty)
        self.difficulty, self.shape = difficulty, shape


class Open(OnPolicyDataModule):
    """A DataModule of a user; its constructor fixes some arguments and passes others to the base class."""

    def __init__(self, difficulty: int, *args: Any, levels: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, num_envs=4, frames_per_batch=64, **kwargs)
        self.difficulty, self.levels = difficulty, levels


class Deeper(Open):
    """A DataModule of a user that inherits the constructor of ``Open``."""


def double(value: float) -> float:
    return 2 * value


SUBCLASSES: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "a setting": (
        partial(Harder, "CartPole-v1", num_envs=4, frames_per_batch=64, difficulty=3),
        {},
        {"difficulty": 3, "num_envs": 4},
    ),
    "a constructor": (partial(Named, "CartPole-v1", 3, shape=double), {"shape": double}, {"difficulty": 3}),
    "an open constructor": (
        partial(Open, 3, env="CartPole-v1", levels={"first": [1, 2.5]}, mini_batch_size=32, seed=4),
        {},
        {"difficulty": 3, "levels": {"first": [1, 2.5]}, "mini_batch_size": 32, "seed": 4},
    ),
    "an inherited constructor": (
        partial(Deeper, 3, env="CartPole-v1", eval_episodes=3),
        {},
        {"difficulty": 3, "levels": None, "eval_episodes": 3},
    ),
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_subclass_is_rebuilt_with_its_own_arguments(name: str, tmp_path: Path) -> None:
    make, given, hparams = SUBCLASSES[name]
    data = make()
    assert {key: data.hparams[key] for key in hparams} == hparams
    assert is_plain(dict(data.hparams))
    run = trainer(tmp_path, max_epochs=1, limit_val_batches=0)
    run.fit(TinyActorCritic(), datamodule=data)
    run.save_checkpoint(tmp_path / "at.ckpt")
    rebuilt = type(data).load_from_checkpoint(tmp_path / "at.ckpt", env="CartPole-v1", **given)
    assert rebuilt.hparams == data.hparams
    assert rebuilt.difficulty == 3
    rebuilt.setup("fit")
    assert torch.equal(rebuilt.buffer.rollout["action"], data.buffer.rollout["action"])
    rebuilt.close()
    if given:
        with pytest.raises(TypeError, match="shape="):
            type(data).load_from_checkpoint(tmp_path / "at.ckpt", env="CartPole-v1")


# ---------------------------------------------------------------------- a state before setup


def test_state_that_is_loaded_before_setup_is_restored_in_it(saved: Callable[[str], Path]) -> None:
    state = torch.load(saved("replay"), weights_only=True)["ReplayDataModule"]
    _, data = replay()
    data.load_state_dict(state)
    assert (data.frames, data.updates) == (state["ranks"][0]["frames"], 10)
    data.setup("validate")
    assert data.buffer is None
    data.setup("fit")
    expected = replay()[1]
    expected.setup("fit")
    expected.load_state_dict(state)
    assert (data.buffer.sample(8) == expected.buffer.sample(8)).all()
    assert not differences(data.state_dict(), expected.state_dict())
    data.setup("fit")  # later calls change nothing
    assert not differences(data.state_dict(), expected.state_dict())
    for each in (data, expected):
        each.close()


def test_rebuilt_datamodule_evaluates_before_setup(saved: Callable[[str], Path], tmp_path: Path) -> None:
    module, data, run = fitted(tmp_path, "rollouts, normalised")
    run.save_checkpoint(tmp_path / "at.ckpt")
    rebuilt = OnPolicyDataModule.load_from_checkpoint(tmp_path / "at.ckpt", env="CartPole-v1")
    evaluated = data.evaluate(module.policy, 2)
    assert (rebuilt.evaluate(module.policy, 2) == evaluated).all()


def test_buffer_is_a_class_or_a_function_and_never_in_the_settings() -> None:
    data = ReplayDataModule("CartPole-v1", buffer=ExperienceBuffer)
    assert data.make_buffer is ExperienceBuffer
    assert "buffer" not in data.hparams
