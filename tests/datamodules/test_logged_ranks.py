"""Two ranks log the same columns as one process over the same episodes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict

from kit.actor_critic import rollouts
from kit.demonstrated_runs import ppo
from kit.fake_data import Loader
from kit.ranks import Report, fit_ranks, reports, run_ranks
from kit.replay import dqn, replay_data
from kit.runs import SaveAt, trainer
from torchrl_lightning import (
    BestCheckpoint,
    MLPNetwork,
    PPOModule,
    ReplayDataModule,
    RolloutMetricsLogger,
)
from torchrl_lightning._core.ranks import this_rank

ENVS, FRAMES, EPOCHS, EPISODES = 2, 32, 4, 4
EPISODE_COLUMNS = ("train/return", "train/length", "train/episodes")
EVALUATED = ("eval/return", "eval/return_std", "eval/length", "eval/success")
OFFSET = 1e6
"""Two returns that differ by 1 have the same float32 mean at this offset."""


class Scripted(gym.Env[Any, Any]):
    """Rewards and lengths of episodes depend on the environment's number over all ranks."""

    observation_space = gym.spaces.Box(-1.0, 1.0, [2])
    action_space = gym.spaces.Discrete(2)

    def __init__(self, index: int, envs: int, *, is_late: bool, offset: float = 0.0) -> None:
        self.index, self.envs, self.is_late, self.offset, self.episodes = index, envs, is_late, offset, 0

    @property
    def number(self) -> int:
        return this_rank() * self.envs + self.index

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episodes, self.steps = self.episodes + 1 if seed is None else 1, 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        # The environments of the second rank are late: their first episode ends in the third epoch.
        last = 40 if self.is_late and self.number >= ENVS and self.episodes == 1 else 2 + self.number
        done = self.steps >= last
        reward = self.offset / last + 0.25 * self.number**2 + 0.5 * self.episodes
        # Only the environments of the second rank report their success.
        info = {"is_success": self.episodes % 2 == 0} if self.number >= ENVS else {}
        return np.full(2, 0.1, np.float32), reward, done, False, info


def vector_env(envs: int, **settings: Any) -> SyncVectorEnv:
    makes = [partial(Scripted, index, envs, **settings) for index in range(envs)]
    return SyncVectorEnv(makes, autoreset_mode=AutoresetMode.SAME_STEP)


def sizes(ranks: int, *, is_late: bool, offset: float) -> dict[str, Any]:
    """Return the settings of each rank, so that all ranks together have the same environments and frames."""
    envs, episodes = 2 * ENVS // ranks, 2 * EPISODES // ranks
    return {
        "env": vector_env(envs, is_late=is_late),
        "eval_env": vector_env(envs, is_late=False, offset=offset),
        "num_envs": envs,
        "frames_per_batch": 2 * FRAMES // ranks,
        "eval_episodes": episodes,
        "eval_num_envs": envs,
    }


def on_policy(ranks: int, **settings: Any) -> tuple[Any, Any]:
    return ppo(), rollouts(**{**sizes(ranks, **settings), "mini_batch_size": None, "num_mini_batch": 2})


def replay(ranks: int, **settings: Any) -> tuple[Any, ReplayDataModule]:
    ratio = {"frames_per_update": 2 * FRAMES // ranks // 2, "warmup_frames": 2 * FRAMES // ranks}
    return dqn(), replay_data(**{**sizes(ranks, **settings), **ratio, "updates_per_epoch": 2})


CASES: dict[str, tuple[Callable[..., Any], bool]] = {
    "rollouts": (on_policy, False),
    "late rollouts": (on_policy, True),
    "late replay": (replay, True),
}
"""The factory of a run, and whether the second rank finishes no episode in the first epochs."""


class EvaluatedAlready(Callback):
    """Stores the names of the metrics that a user's callback finds at the end of an evaluation."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_validation_end(self, run: Any, module: Any) -> None:
        self.names = sorted(run.callback_metrics)


def tell(module: Any, data: Any) -> dict[str, Any]:
    run = module.trainer
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    best = next(callback for callback in run.callbacks if isinstance(callback, BestCheckpoint))
    return {
        "metrics": metrics,
        "epoch": module.last_epoch_metrics,
        "own": data.metrics(),
        "evaluated": next(each.names for each in run.callbacks if isinstance(each, EvaluatedAlready)),
        "best": [best.best_model_path, float(best.best_model_score)],
    }


def settings_of(folder: Path) -> dict[str, Any]:
    loggers = [CSVLogger(folder, "csv", "")]
    return {"max_epochs": EPOCHS, "limit_val_batches": 1, "logger": loggers}


def callbacks(folder: Path) -> list[Callback]:
    best = BestCheckpoint(folder / "best", monitor="eval/success", mode="max")
    return [RolloutMetricsLogger(), best, EvaluatedAlready()]


def fit_two(folder: Path) -> None:
    for case, (make, is_late) in CASES.items():
        into = folder / case
        into.mkdir()
        module, data = make(2, is_late=is_late, offset=OFFSET)
        fit_ranks(module, data, Report(into, "fit", tell), *callbacks(into), **settings_of(into))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_ranks(fit_two, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    for case, (make, is_late) in CASES.items():
        into = folder / case
        into.mkdir()
        module, data = make(1, is_late=is_late, offset=OFFSET)
        run = trainer(into, **settings_of(into), callbacks=callbacks(into))
        run.fit(module, datamodule=data)
        (into / "fit.json").write_text(json.dumps(tell(module, data)))
    return folder


def columns_of(folder: Path) -> dict[str, list[float]]:
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


@pytest.mark.parametrize("case", CASES)
def test_columns_equal_those_of_one_process(case: str, two_ranks: Path, one_process: Path) -> None:
    actual, expected = (columns_of(folder / case) for folder in (two_ranks, one_process))
    assert set(actual) == set(expected)
    exact = ["frames", "step", "train/episodes", "updates", "replay/size", "train/learning_rate", "train/updates"]
    for name in exact:
        assert actual.get(name) == expected.get(name), name
    for name in (*EPISODE_COLUMNS, *EVALUATED):
        assert actual[name] == pytest.approx(expected[name], rel=1e-9), name


@pytest.mark.parametrize("case", CASES)
def test_columns_cover_the_episodes_of_all_ranks(case: str, two_ranks: Path) -> None:
    columns = columns_of(two_ranks / case)
    first, second = reports(two_ranks / case, "fit")
    counts = [report["own"].get("train/episodes", 0.0) for report in (first, second)]
    assert columns["train/episodes"][-1] == sum(counts)
    assert counts[0] != counts[1]
    # Each environment plays its first two episodes of an evaluation.
    totals = []
    for number in range(2 * ENVS):
        length = 2 + number
        for episode in (1, 2):
            rewards = np.float32(OFFSET / length + 0.25 * number**2 + 0.5 * episode)
            totals.append(float(np.float32(length * float(rewards))))
    assert len(totals) == 2 * EPISODES
    assert columns["eval/return"][0] == pytest.approx(np.mean(totals), rel=1e-6)
    assert columns["eval/success"][0] == 0.25


@pytest.mark.parametrize("case", CASES)
def test_ranks_monitor_equal_metrics(case: str, two_ranks: Path, one_process: Path) -> None:
    first, second = reports(two_ranks / case, "fit")
    for name in ("metrics", "epoch", "evaluated", "best"):
        assert first[name] == second[name], name
    assert set(EVALUATED) <= set(first["evaluated"])
    alone = json.loads((one_process / case / "fit.json").read_text())
    assert set(first["metrics"]) == set(alone["metrics"])
    assert first["best"][1] == alone["best"][1]


def test_deviation_of_several_batches_covers_all_episodes(tmp_path: Path) -> None:
    module, data = on_policy(1, is_late=False, offset=0.0)
    returns = torch.tensor([0.0, 1.0, 8.0, 100.0, 102.0]) + 1e6
    batches = [partial(_episodes, part) for part in returns.split(3)]
    data.val_dataloader = data.test_dataloader = lambda: Loader(2, lambda: (make() for make in batches))
    for call in ("validate", "test"):
        run = trainer(tmp_path)
        (scores,) = getattr(run, call)(module, data, verbose=False)
        assert scores["eval/return"] == float(returns.double().mean())
        assert scores["eval/return_std"] == pytest.approx(float(returns.double().std(correction=0)), rel=1e-12)
        assert scores["eval/length"] == 3.0


def _episodes(returns: torch.Tensor) -> TensorDict:
    lengths = torch.full(returns.shape, 3)
    return TensorDict({"episode_return": returns, "episode_length": lengths}, returns.shape)


def test_restored_metrics_keep_their_rules(tmp_path: Path) -> None:
    module, data = on_policy(1, is_late=False, offset=0.0)
    save, settings = SaveAt(tmp_path / "end.ckpt", "on_train_epoch_end"), {"max_epochs": 1, "limit_val_batches": 1}
    trainer(tmp_path, callbacks=[save], **settings).fit(module, datamodule=data)
    expected = data.metrics()
    module, data = on_policy(1, is_late=False, offset=0.0)
    trainer(tmp_path, **settings).fit(module, datamodule=data, ckpt_path=tmp_path / "end.ckpt")
    restored = data.metrics()
    assert restored == expected
    assert list(map(type, restored.values())) == list(map(type, expected.values()))
    assert restored["train/return"].weight == expected["train/return"].weight == restored["train/episodes"] > 0


class UpdatesOfFirstRank(PPOModule):
    """Accumulates metrics on the first rank only."""

    def on_validation_start(self) -> None:
        if this_rank():
            self.metric_sums.flush()
        super().on_validation_start()

    def on_train_epoch_end(self) -> None:
        if this_rank():
            self.metric_sums.flush()
        super().on_train_epoch_end()


def epochs(module: Any, data: Any) -> dict[str, Any]:
    metrics = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    return {"epoch": module.last_epoch_metrics, "metrics": metrics, "epochs": module.trainer.current_epoch}


def fit_partly(folder: Path) -> None:
    module, data = UpdatesOfFirstRank(MLPNetwork([8])), on_policy(2, is_late=True, offset=0.0)[1]
    stop = EarlyStopping("train/loss_critic", patience=100)
    fit_ranks(module, data, Report(folder, "partly", epochs), stop, **settings_of(folder))


def test_rank_without_updates_lets_no_rank_wait(tmp_path: Path) -> None:
    run_ranks(fit_partly, tmp_path)
    first, second = reports(tmp_path, "partly")
    assert first == second
    assert first["epochs"] == EPOCHS
    assert "train/loss_critic" in first["epoch"]
