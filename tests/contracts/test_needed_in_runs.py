"""Every entry of a run's checkpoint is needed: a run that is resumed without it goes on otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from torchrl.objectives import HardUpdate

from contracts.agents import (
    BEHIND_EPOCH,
    BEHIND_UPDATE,
    EXACT,
    IN_UPDATE,
    NO_EVALUATION,
    NORMALISED,
    Noisy,
    Stop,
    collected,
    imagining,
    of_torchrl,
    planning,
    replayed,
)
from contracts.dropped import declared, without
from contracts.streams import REPLAYS, SEEDED, beside_data, offline, shown
from kit.dynamics import model_data
from kit.replay import dqn, replay_data
from kit.runs import SaveAt, parameters, trainer
from kit.states import differences
from kit.torchrl_losses import iql
from torchrl_lightning import CrossEntropyPlanner, ExperienceDataModule, GAEBuffer
from torchrl_lightning.callbacks import ExperienceLog
from torchrl_lightning.learn import DQNModule, DynamicsEnsemble, MLPNetwork, PPOModule, load_policy


def lasting(metrics: Any) -> dict[str, float]:
    """Return the metrics that do not depend on the machine's load."""
    return {name: float(each) for name, each in metrics.items() if "time/" not in name and "per_second" not in name}


class Rows(Logger):
    """Keeps what is logged, but times."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, lasting(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Course(L.Callback):
    """Notes weights and scores; it has no hooks on batches, beside which steps would be single updates."""

    def __init__(self) -> None:
        self.course: list[Any] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.course.append((trainer.global_step, parameters(pl_module)))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.course.append((trainer.global_step, lasting(trainer.callback_metrics)))


class Resumed(NamedTuple):
    """A run, and the place of its checkpoint; of several, each but the first is in a run that resumed from the last."""

    make: Callable[[], tuple[Any, Any]]
    stops: tuple[Stop, ...]
    limits: dict[str, Any] = {}


def run(row: Resumed, seed: int, folder: Path, *callbacks: Any, ckpt_path: Path | None = None, **settings: Any) -> Any:
    torch.manual_seed(seed)
    module, data = row.make()
    limits = {"max_epochs": 3, "limit_val_batches": 1, **row.limits, **settings}
    made = trainer(folder, inference_mode=False, callbacks=[*callbacks], **limits)
    made.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return made, module, data


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What writes the checkpoint of each run once."""

    @cache
    def write(name: str) -> Path:
        row, folder, path = RUNS[name], tmp_path_factory.mktemp("runs"), None
        for number, at in enumerate(row.stops):
            before, path = path, folder / f"{number}.ckpt"
            save = SaveAt(path, at.hook, at.count, epoch=at.epoch, then="fail")
            with pytest.raises(RuntimeError, match="stopped"):
                run(row, number, folder, save, ckpt_path=before)
        assert path is not None
        return path

    return write


def gone_on(row: Resumed, path: Path, dropped: str | None = None, restored: set[str] | None = None) -> list[Any]:
    """Return how a run goes on from a checkpoint, or the words of its error."""
    rows, course = Rows(), Course()
    with without(dropped, restored):
        try:
            made, module, data = run(row, 9, path.parent, course, ExperienceLog(), ckpt_path=path, logger=rows)
        except Exception as error:
            return [repr(error)]
    metrics = data.metrics() if isinstance(data, ExperienceDataModule) else {}
    end = made.global_step, made.current_epoch, lasting(metrics)
    return [rows.rows, course.course, parameters(module), end]


@pytest.fixture(scope="module")
def whole(checkpoint: Callable[[str], Path]) -> Callable[[str], list[Any]]:
    return cache(lambda name: gone_on(RUNS[name], checkpoint(name)))


class StopsWithinStep(DQNModule):
    """Tells callbacks of its third update, which is within a step."""

    loops_over_updates = True

    def step_optimizers(self, *, inner: bool = False) -> Any:
        if self.updates == 13:
            for callback in self.trainer.callbacks:
                getattr(callback, "within_step", lambda trainer: None)(self.trainer)
        return super().step_optimizers(inner=inner)


def ppo(**settings: Any) -> tuple[Any, Any]:
    return PPOModule(MLPNetwork([4])), collected(Noisy, **settings)[1]


def within_step() -> tuple[Any, Any]:
    return StopsWithinStep(MLPNetwork([8], "relu"), epsilon_frames=100), replay_data(**{**EXACT, "updates_per_step": 5})


def anew(**settings: Any) -> tuple[Any, Any]:
    return dqn(), replay_data(**{**EXACT, "checkpoint_buffer": "none", **settings})


def rewards_as_they_come() -> tuple[Any, Any]:
    """Environments that are not reset, and rewards that wait to be taken into the statistics."""
    lengths = {"updates_per_epoch": 20, "frames_per_update": 10.0}
    return dqn(gamma=0.5), replay_data(**NORMALISED, **lengths, updates_per_step=1)


def as_it_fits() -> tuple[Any, Any]:
    return dqn(), replay_data(**{**EXACT, "updates_per_step": "auto"})


def unseeded() -> tuple[Any, Any]:
    planner = partial(CrossEntropyPlanner, horizon=2, candidates=8, elites=2, iterations=2)
    return DynamicsEnsemble([8], planner=planner, learning_rate=0.01), model_data(seed=None)


def short_episodes() -> tuple[Any, Any]:
    return planning()[0], model_data(env=partial(gymnasium.make, "Pendulum-v1", max_episode_steps=5))


def impatient() -> tuple[Any, Any]:
    """Members that never improve enough."""
    return DynamicsEnsemble([8], learning_rate=0.01, patience=2, min_improvement=0.9), model_data()


class Halting(PPOModule):
    """Skips the rest of each epoch from its second update on, and would not ask again."""

    def should_stop(self, terms: Any) -> bool:
        return bool(self.trainer.fit_loop.epoch_loop.batch_progress.current.ready == 2)


def halting() -> tuple[Any, Any]:
    return collected(lambda: Halting(MLPNetwork([4])), buffer=GAEBuffer)


def delayed() -> tuple[Any, Any]:
    return dqn(target_interval=4, tau=1.0), replay_data(**EXACT)


INTERVAL = partial(HardUpdate, value_network_update_interval=4)
SCORED = {"limit_val_batches": 1.0}
RUNS: dict[str, Resumed] = {
    "amid a rollout": Resumed(partial(collected, Noisy, buffer=GAEBuffer), (Stop(BEHIND_UPDATE, 6),), NO_EVALUATION),
    "before an evaluation": Resumed(partial(collected, Noisy), (Stop(BEHIND_UPDATE, 8),)),
    "behind an epoch": Resumed(partial(ppo, total_frames=3 * 64), (Stop(BEHIND_EPOCH, 2),), {"max_epochs": -1}),
    "normalised": Resumed(partial(ppo, **NORMALISED), (Stop(BEHIND_UPDATE, 6),), NO_EVALUATION),
    "replayed": Resumed(partial(shown, **REPLAYS), (Stop(BEHIND_EPOCH, 1),), NO_EVALUATION),
    "amid an epoch of replay": Resumed(replayed, (Stop(BEHIND_UPDATE, 15),), NO_EVALUATION),
    "before a collection": Resumed(replayed, (Stop(BEHIND_UPDATE, 12),), NO_EVALUATION),
    "before an update of replay": Resumed(replayed, (Stop(IN_UPDATE, 15),), NO_EVALUATION),
    "rewards as they come": Resumed(
        rewards_as_they_come, (Stop(BEHIND_UPDATE, 13),), {"max_epochs": 2, **NO_EVALUATION}
    ),
    "within a step": Resumed(within_step, (Stop("within_step"),), NO_EVALUATION),
    "as it fits": Resumed(as_it_fits, (Stop(BEHIND_UPDATE, 10),), NO_EVALUATION),
    "twice without its buffer": Resumed(anew, (Stop(BEHIND_UPDATE, 13), Stop(BEHIND_UPDATE, 3)), NO_EVALUATION),
    "amid a fit": Resumed(short_episodes, (Stop(BEHIND_UPDATE, 2, 1),), {"max_epochs": 6, **SCORED}),
    "amid a later fit": Resumed(planning, (Stop(BEHIND_UPDATE, 1, 5),), {"max_epochs": 9, **SCORED}),
    "amid the first pass": Resumed(short_episodes, (Stop(BEHIND_UPDATE, 1, 0),), {"max_epochs": 2, **SCORED}),
    "before a pass": Resumed(planning, (Stop("on_train_epoch_start", 1, 0),), {"max_epochs": 6, **SCORED}),
    "between passes": Resumed(planning, (Stop(BEHIND_EPOCH, 1, 1),), {"max_epochs": 6, **SCORED}),
    "a fit without a seed": Resumed(unseeded, (Stop(BEHIND_UPDATE, 2, 1),), {"max_epochs": 4, **SCORED}),
}

RUNS |= {
    "mined": Resumed(partial(shown, **SEEDED), (Stop(BEHIND_EPOCH, 2),), NO_EVALUATION),
    "windows": Resumed(partial(replayed, "recent, prioritized"), (Stop(BEHIND_UPDATE, 15),), NO_EVALUATION),
    "imagined": Resumed(imagining, (Stop(BEHIND_UPDATE, 15),), NO_EVALUATION),
    "offline": Resumed(partial(offline, "inside"), (Stop(BEHIND_UPDATE, 15),), NO_EVALUATION),
    "beside a data set": Resumed(partial(beside_data, "inside"), (Stop(BEHIND_UPDATE, 15),), NO_EVALUATION),
    "skipped updates": Resumed(halting, (Stop(BEHIND_UPDATE, 6),), NO_EVALUATION),
    "delayed targets": Resumed(delayed, (Stop(BEHIND_UPDATE, 15),), NO_EVALUATION),
    "targets of TorchRL": Resumed(partial(of_torchrl, iql, INTERVAL), (Stop(BEHIND_EPOCH),)),
    "behind a judgement": Resumed(impatient, (Stop("on_validation_end", 1, 1),), {"max_epochs": 6, **SCORED}),
    "without progress": Resumed(impatient, (Stop(BEHIND_EPOCH, 1, 1),), {"max_epochs": 6, **SCORED}),
}
AGENTS: dict[tuple[str, str], str] = {
    ("on_policy", "stopped"): "skipped updates",
    ("off_policy", "updates"): "delayed targets",
    ("off_policy", "exploration"): "before a collection",
    ("target_updater", "counter"): "targets of TorchRL",
    ("dynamics_ensemble", "epochs_waited"): "without progress",
    ("dynamics_ensemble", "is_judged"): "behind a judgement",
    ("dynamics_ensemble", "planner"): "amid a later fit",
}
"""The run that shows an entry of an agent."""

BUILT_OF = {"num_members": 2, "observation_keys": [["other"]], "learns_reward": False, "learns_terminated": True}
"""Entries that say how the networks of a policy that is loaded are built, and other values."""

SHOWN: dict[str, str] = {
    "ExperienceDataModule.frames": "behind an epoch",
    "ExperienceDataModule.replayed": "replayed",
    "ExperienceDataModule.num_evaluations": "behind an epoch",
    "ExperienceDataModule.rng": "amid a rollout",
    "ExperienceDataModule.episodes": "rewards as they come",
    "ExperienceDataModule.normalization": "rewards as they come",
    "ExperienceDataModule.collector": "behind an epoch",
    "ExperienceDataModule.evaluation_due": "before an evaluation",
    "UpdatesDataModule.in_step": "within a step",
    "UpdatesDataModule.updates_per_step": "as it fits",
    "ReplayDataModule.updates": "amid an epoch of replay",
    "ReplayDataModule.refilled": "twice without its buffer",
    "ReplayDataModule.batch": "before an update of replay",
    "OnPolicyDataModule.metrics": "amid a rollout",
    "OnPolicyDataModule.place": "amid a rollout",
    "DynamicsDataModule.metrics": "amid the first pass",
    "DynamicsDataModule.split": "between passes",
    "DynamicsDataModule.fits": "between passes",
    "DynamicsDataModule.epochs_of_fit": "between passes",
    "DynamicsDataModule.pass_of": "before a pass",
    "DynamicsDataModule.order_seed": "a fit without a seed",
    # Of parts that only a run uses.
    "FinishedEpisodes.finished": "rewards as they come",
    "FrameClock.count": "replayed",
    "RewardScale.sums": "rewards as they come",
    "RewardScale.noted": "rewards as they come",
    "RewardScale.gamma": "rewards as they come",
    "Normalization.count": "rewards as they come",
    "Normalization.total": "rewards as they come",
    "Normalization.rows": "rewards as they come",
    "Normalization.scale": "rewards as they come",
}
"""The run that shows an entry."""


# Entries of parts that decide how a run of their family goes on. Rows and where they lie are left out: a run without
# them would read memory that was never written.
PARTS_OF_RUNS: dict[str, tuple[str, ...]] = {
    "amid a rollout": ("RolloutBuffer.storage", "RolloutStorage.data", "CollectorBase.batches"),
    "replayed": (
        "PPODBuffer.demonstrations",
        "DemonstrationHooks.replay",
        "DemonstrationReplay.playing",
    ),
    "mined": (
        "DemonstrationHooks.storage",
        "DemonstrationStorage.value",
    ),
    "amid an epoch of replay": (
        "ExperienceBuffer.sampler",
        "PrioritizedSampler.leaves",
        "PrioritizedSampler.priorities",
        "PrioritizedSampler.largest",
    ),
    "windows": ("RecentSampler.prioritized",),
    "imagined": (
        "MixedReplay.others",
        "BranchedReplay.mixed",
        "BranchedReplay.split",
        "BranchedReplay.fits",
        "BranchedReplay.fitted_at",
        "BranchedReplay.rows",
        "HoldoutSplit.held",
    ),
    "offline": ("PrioritizedSampler.leaves",),
    "beside a data set": ("MixedReplay.others",),
    "between passes": ("HoldoutSplit.held",),
}
OF_RUNS = [
    *((SHOWN[name], name) for name in SHOWN),
    *((run, name) for run, names in PARTS_OF_RUNS.items() for name in names),
]


def test_each_entry_of_a_run_has_one_that_shows_it() -> None:
    names = {name for name, entry in declared(ExperienceDataModule).items() if not entry.is_built}
    assert names <= set(SHOWN)


@pytest.mark.parametrize(("of", "name"), OF_RUNS)
def test_a_run_that_is_resumed_without_an_entry_goes_on_otherwise(
    of: str, name: str, checkpoint: Callable[[str], Path], whole: Callable[[str], list[Any]]
) -> None:
    row, path, expected = RUNS[of], checkpoint(of), whole(of)
    assert len(expected) > 1, expected
    restored: set[str] = set()
    course = gone_on(row, path, name, restored)
    assert name in restored
    assert differences(course, expected), f"{name} changes nothing in a run"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_from_a_checkpoint_always_alike(
    name: str, checkpoint: Callable[[str], Path], whole: Callable[[str], list[Any]]
) -> None:
    assert not differences(gone_on(RUNS[name], checkpoint(name)), whole(name))


def started(row: Resumed, folder: Path) -> Any:
    """Return the checkpoint of a run that has just begun."""
    with pytest.raises(RuntimeError, match="stopped"):
        run(row, 9, folder, SaveAt(folder / "start.ckpt", "on_train_start", then="fail"))
    return torch.load(folder / "start.ckpt", weights_only=True)


@pytest.mark.parametrize(("state", "entry"), AGENTS)
def test_a_run_that_is_resumed_without_an_entry_of_its_agent_goes_on_otherwise(
    state: str, entry: str, checkpoint: Callable[[str], Path], whole: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    name = AGENTS[state, entry]
    content = torch.load(checkpoint(name), weights_only=True)
    assert content[state][entry] is not None
    content[state][entry] = started(RUNS[name], tmp_path)[state][entry]
    torch.save(content, checkpoint(name).with_name("changed.ckpt"))
    assert differences(gone_on(RUNS[name], checkpoint(name).with_name("changed.ckpt")), whole(name))


def test_each_entry_of_an_agent_has_one_that_shows_it(checkpoint: Callable[[str], Path]) -> None:
    states = {state for state, _ in AGENTS}
    found = set()
    for name in dict.fromkeys(AGENTS.values()):
        content = torch.load(checkpoint(name), weights_only=True)
        found |= {(state, entry) for state in states & set(content) for entry in content[state]}
    found = {(state, entry) for state, entry in found if state != "target_updater"}  # which is TorchRL's
    shown = {(state, entry) for state, entry in AGENTS if state != "target_updater"}
    assert found == shown | {("dynamics_ensemble", entry) for entry in BUILT_OF}


@pytest.mark.parametrize("entry", BUILT_OF)
def test_a_policy_is_built_of_what_a_checkpoint_says(
    entry: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    content = torch.load(checkpoint("amid a fit"), weights_only=True)
    content["dynamics_ensemble"][entry] = BUILT_OF[entry]
    torch.save(content, tmp_path / "changed.ckpt")
    load_policy(checkpoint("amid a fit"), planning()[0])
    with pytest.raises((KeyError, RuntimeError, ValueError)):
        load_policy(tmp_path / "changed.ckpt", planning()[0])
