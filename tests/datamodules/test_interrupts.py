"""A signal may stop a run at every boundary between its components: the resumed run equals an uninterrupted run."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from lightning.pytorch import Callback

from kit.actor_critic import rollouts
from kit.demonstrated_runs import demonstrated, shown
from kit.demonstrated_runs import ppo as ppo_module
from kit.demonstrations import saved
from kit.dynamics import model_data
from kit.replay import dqn, replay_data
from kit.runs import trainer
from kit.states import differences
from torchrl_lightning import BestCheckpoint, LastCheckpoint
from torchrl_lightning._core.files import read_state_folder
from torchrl_lightning._core.interrupts import InterruptHolder, interrupts
from torchrl_lightning.agents import DynamicsEnsemble, MLPNetwork, PPOModule, RandomShootingPlanner

WHERE = ("torchrl_lightning", "lightning/pytorch", "torch/optim")
IGNORED = ("/interrupts.py",)


@contextmanager
def at_return(is_due: Callable[[FrameType], bool], *numbers: int) -> Iterator[list[str]]:
    """Send signals to this process when a function returns and ``is_due`` is true; yield the functions' names."""
    sent: list[str] = []
    left = list(numbers)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and left and is_due(frame):
            sent.append(frame.f_code.co_qualname)
            os.kill(os.getpid(), left.pop(0))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield sent
    finally:
        sys.setprofile(before)


def nth_return(number: int, name: str | None = None) -> Callable[[FrameType], bool]:
    """Return a function that is true from the ``number``-th return on, of this function or of packages in ``WHERE``."""
    seen = 0

    def is_due(frame: FrameType) -> bool:
        nonlocal seen
        file = frame.f_code.co_filename
        if name is None:
            is_counted = any(each in file for each in WHERE) and not file.endswith(IGNORED)
        else:
            is_counted = frame.f_code.co_qualname == name
        seen += is_counted
        return seen >= number

    return is_due


def run(folder: Path, make: Callable[[Path], tuple[Any, Any]], ckpt_path: Path | None = None, **settings: Any) -> Path:
    """Fit with the checkpoints of our commands, to the end or to a signal; return the path of the last checkpoint."""
    last = LastCheckpoint(folder)
    best = BestCheckpoint(folder, "best", monitor="eval/return", mode="max")
    module, data = make(folder)
    made = trainer(folder, **{"max_epochs": -1, "callbacks": [best, last], **settings})
    with suppress(SystemExit):
        made.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return last.path


def content(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint without times and folders."""
    stored = torch.load(path, weights_only=True)
    (name,) = (name for name in stored if name.endswith("DataModule"))
    (own,) = stored[name]["ranks"]
    own = {key: value for key, value in own.items() if key != "metrics"}
    if "snapshot" in own:
        snapshot = own.pop("snapshot")
        own["buffer"] = read_state_folder(Path(snapshot["folder"]) / snapshot["name"])
    names = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
    return {"data": own, "normalization": stored[name]["normalization"], **{each: stored[each] for each in names}}


def changed(whole: Path, resumed: Path) -> list[str]:
    """Return the names of the entries that differ in the last checkpoints of two runs."""
    return [each.partition(":")[0] for each in differences(content(whole), content(resumed))]


pytestmark = [
    pytest.mark.skipif(not hasattr(os, "kill"), reason="sends signals"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """Set Python's default handlers, because background jobs ignore Ctrl-C and Ray exits on SIGTERM."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ppo(folder: Path, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    sizes = {"total_frames": 64 * 4, "reset_at_each_batch": True, "updates_per_step": 1}
    return PPOModule(MLPNetwork([8]), learning_rate=0.01), rollouts(**{**sizes, **settings})


def normalized(folder: Path) -> tuple[Any, Any]:
    return ppo(folder, updates_per_step=4, normalize_observation=True, normalize_reward=True)


def deep_q(folder: Path, **settings: Any) -> tuple[Any, Any]:
    sizes = {"updates_per_epoch": 8, "frames_per_batch": 8, "frames_per_update": 2, "updates_per_step": 1}
    return dqn(), replay_data(**{**sizes, "total_frames": 40 + 64, "reset_at_each_batch": True, **settings})


def beside(folder: Path) -> tuple[Any, Any]:
    return deep_q(folder, updates_per_step=3, checkpoint_buffer="beside", buffer="prioritized")


def dynamics(folder: Path) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return DynamicsEnsemble(
        hidden_sizes=[4], planner=partial(RandomShootingPlanner, horizon=2, candidates=8)
    ), model_data(frames_per_batch=10)


def demonstrations(folder: Path) -> tuple[Any, Any]:
    return ppo_module(), ppo(folder, buffer=demonstrated(str(folder.parent / "demos")))[1]


STREAMS: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    each.__name__: each for each in (ppo, normalized, deep_q, beside, dynamics, demonstrations)
}
COLLECTED = ["GymnasiumCollector._number_trajectories", "CollectorStream.next", "FrameClock.add"]
LEARNED = [
    "FusedAdam.step",
    "StepHooks.on_train_batch_end",
    "_Progress.increment_ready",
    "_Progress.increment_completed",
]
SAVED = ["play_episodes", "DueEvaluation.end", "LastCheckpoint._save"]
ALL = [*COLLECTED, *LEARNED, *SAVED]
ROLLOUT = [
    "OnPolicyDataModule._check_rollout",
    "Normalization.normalize_rollout",
    "RolloutWriter._cell_coordinates",
    "OnPolicyDataModule._record_position",
]
BOUNDARIES: dict[str, list[str]] = {
    "ppo": [*ALL, *ROLLOUT],
    "normalized": ["FrameClock.add", *ROLLOUT],
    "deep_q": [*ALL, "ReplayDataModule._store", "ExperienceBuffer.sample", "ReplayDataModule.apply_feedback"],
    "beside": [
        "ReplayDataModule._store",
        "ReplayDataModule.apply_feedback",
        "BufferSnapshots.save",
        "_Progress.increment_started",
    ],
    "dynamics": [
        "DynamicsDataModule._collect_frames",
        "HoldoutSplit.extend",
        "DynamicsDataModule._load_rows",
        "LastCheckpoint._save",
    ],
    "demonstrations": ["CollectorStream.next", "FrameClock.add", "OnPolicyDataModule._record_position"],
}
CASES = [(stream, name) for stream, names in BOUNDARIES.items() for name in names]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs each stream once without a stop, and returns the last checkpoint."""

    def run_once(stream: str) -> Path:
        folder = tmp_path_factory.mktemp(stream)
        (folder / "demos").mkdir()
        saved(folder / "demos", shown(5), shown(9))
        return run(folder / "whole", STREAMS[stream])

    return cache(run_once)


@pytest.mark.parametrize(("stream", "name"), CASES)
def test_run_that_ctrl_c_stops_at_a_boundary_is_resumed_as_the_same_run(stream: str, name: str, whole: Any) -> None:
    make, expected = STREAMS[stream], whole(stream)
    folder = expected.parents[1] / name
    with at_return(nth_return(2, name), signal.SIGINT) as sent:
        path = run(folder, make)
    assert sent == [name]
    assert changed(expected, run(folder, make, path)) == []


@pytest.mark.parametrize("make", [ppo, deep_q], ids=["ppo", "deep_q"])
@pytest.mark.parametrize("name", ["FrameClock.add", "FusedAdam.step"])
def test_sigterm_waits_for_the_end_of_a_step(make: Any, name: str, whole: Any) -> None:
    expected = whole(make.__name__)
    folder = expected.parents[1] / f"{name} terminated"
    with at_return(nth_return(2, name), signal.SIGTERM) as sent:
        path = run(folder, make)
    assert sent == [name]
    assert changed(expected, run(folder, make, path)) == []


@pytest.mark.parametrize("name", ["FrameClock.add", "FusedAdam.step", "StepHooks.on_train_batch_end"])
def test_second_ctrl_c_stops_within_the_step_and_keeps_the_checkpoint_before(
    name: str, whole: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = whole("ppo")
    folder = expected.parents[1] / f"{name} twice"
    with at_return(nth_return(3, name), signal.SIGINT, signal.SIGINT) as sent:
        path = run(folder, ppo)
    assert len(sent) == 2
    assert ("is the previous state" if path.exists() else "no checkpoint yet") in caplog.text
    assert "to resume" not in caplog.text
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if path.exists():
        assert changed(expected, run(folder, ppo, path)) == []


class SlowCartPole(CartPoleEnv):
    """Interrupt the run at one step, and count all steps."""

    stop_at, steps = -1, 0

    def step(self, action: Any) -> Any:
        type(self).steps += 1
        if self.steps == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


def slow(folder: Path) -> tuple[Any, Any]:
    return ppo(folder, env=SlowCartPole, eval_env="CartPole-v1")


def test_ctrl_c_during_a_rollout_drops_the_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(tmp_path / "whole", slow)
    monkeypatch.setattr(SlowCartPole, "steps", 0)
    monkeypatch.setattr(SlowCartPole, "stop_at", 64 + 10)
    path = run(tmp_path / "cut", slow)
    assert SlowCartPole.steps == 64 + 10
    collector = content(path)["data"]["collector"]
    assert (content(path)["data"]["frames"], collector["frames"], collector["batches"]) == (64, 64, 1)
    assert changed(expected, run(tmp_path / "cut", slow, path)) == []


def test_ctrl_c_during_an_evaluation_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated(folder: Path) -> tuple[Any, Any]:
        return ppo(folder, eval_env=SlowCartPole)

    expected = run(tmp_path / "whole", evaluated)
    monkeypatch.setattr(SlowCartPole, "steps", 0)
    monkeypatch.setattr(SlowCartPole, "stop_at", 3)
    path = run(tmp_path / "cut", evaluated)
    assert SlowCartPole.steps == 3
    assert changed(expected, run(tmp_path / "cut", evaluated, path)) == []


class Failing(PPOModule):
    """Fail after a rollout is collected and before it is accepted."""

    left = 2

    def annotate(self, rollout: Any) -> None:
        self.left -= 1
        if not self.left:
            raise RuntimeError("no annotation")


def test_error_between_collector_and_datamodule_keeps_both_states_before_the_rollout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data, last = ppo(tmp_path)[1], LastCheckpoint(tmp_path)
    module = Failing(MLPNetwork([8]))
    with pytest.raises(RuntimeError, match="no annotation"):
        trainer(tmp_path, max_epochs=-1, callbacks=[last]).fit(module, datamodule=data)
    own = content(last.path)["data"]
    assert (own["frames"], own["collector"]["frames"], own["collector"]["batches"]) == (64, 64, 1)


class Presses(Callback):
    """Presses Ctrl-C when a hook is called."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.press)

    def press(self, *_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)  # handlers run between two instructions


def test_ctrl_c_at_the_end_of_a_fit_ends_the_program(tmp_path: Path) -> None:
    module, data = ppo(tmp_path)
    with pytest.raises(SystemExit):
        trainer(tmp_path, max_epochs=-1, callbacks=[Presses("on_train_end")]).fit(module, datamodule=data)
    assert data.frames == 256
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_user_signal_handler_is_kept(handler: Any, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Look(Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.signal(signal.SIGINT, handler)
    try:
        module, data = ppo(tmp_path)
        trainer(tmp_path, max_epochs=-1, callbacks=[Look()]).fit(module, datamodule=data)
        assert {*seen, signal.getsignal(signal.SIGINT)} == {handler}
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_held_by_the_first_owner() -> None:
    holder, outer, inner = InterruptHolder(), object(), object()
    holder.hold(outer)
    holder.hold(inner)
    os.kill(os.getpid(), signal.SIGINT)
    assert not holder.release(inner)
    assert holder.pending
    assert holder.release(outer)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not interrupts.pending
