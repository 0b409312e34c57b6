"""If the collector of one rank ends or collects less, the run ends on both ranks, and neither rank waits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from kit.actor_critic import TinyActorCritic, rollouts
from kit.fake_ray import fake_ray
from kit.ranks import Report, fit_ranks, reports, run_ranks
from kit.replay import dqn, fit, replay_data
from torchrl_lightning import GymnasiumCollector, ReplayService
from torchrl_lightning._core.ranks import this_rank
from torchrl_lightning.datamodules._run.rank_agreement import rollouts_of_all_ranks

ENDS = {"first": (2, 4), "second": (5, 3), "uneven": (9, 9)}
"""The number of rollouts of each rank, by the rank with the collector that ends earlier."""


def make(name: str, case: str) -> tuple[Any, Any]:
    frames = 8 if name == "replay" else 32

    def collector(policy: Any, seed: int) -> GymnasiumCollector:
        size = frames * 2 if case == "uneven" and this_rank() else frames
        total = size * ENDS[case][this_rank()]
        return GymnasiumCollector(
            "CartPole-v1", policy, num_envs=2, frames_per_batch=size, total_frames=total, seed=seed
        )

    options = {"collector": collector, "num_envs": 2, "frames_per_batch": frames, "total_frames": -1}
    if name == "replay":
        sizes = {"warmup_frames": 16, "frames_per_update": 4, "updates_per_epoch": 100}
        return dqn(), replay_data(**options, **sizes)
    return TinyActorCritic(), rollouts(**options, mini_batch_size=16)


def outcome(module: Any, data: Any) -> dict[str, Any]:
    return {"frames": data.frames, "steps": module.trainer.global_step}


class WriteError(L.Callback):
    """Writes the error of a rank into a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        (self.folder / f"error_{trainer.global_rank}").write_text(str(exception))


def run(folder: Path, name: str) -> None:
    for case in ("first", "second"):
        module, data = make(name, case)
        fit_ranks(module, data, Report(folder, case, outcome), max_epochs=50)
    module, data = make(name, "uneven")
    with pytest.raises(AssertionError):  # both ranks end with an error
        fit_ranks(module, data, Report(folder, "uneven", outcome), WriteError(folder), max_epochs=3)


@pytest.mark.parametrize(("name", "frames"), [("on_policy", 64), ("replay", 16)])
def test_ranks_stop_together_if_one_collector_ends(name: str, frames: int, tmp_path: Path) -> None:
    folder = run_ranks(partial(run, name=name), tmp_path)
    for case, number in (("first", 2), ("second", 3)):
        first, second = reports(folder, case)
        assert first == second
        assert first["frames"] == frames * number
    assert not list(folder.glob("uneven*"))
    for rank in range(2):
        assert "the same number of frames on all ranks, got" in (folder / f"error_{rank}").read_text()


class OtherRankIsEmpty(SingleDeviceStrategy):
    """A strategy of one process; it simulates a second rank that has no rows to sample in two decisions."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.decisions: list[bool] = []

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self.decisions.append(decision)
        return decision and len(self.decisions) > 2


def test_rank_collects_until_the_services_of_all_ranks_have_rows(tmp_path: Path) -> None:
    frames, strategies = [], [SingleDeviceStrategy("cpu"), OtherRankIsEmpty()]
    for number, strategy in enumerate(strategies):
        with fake_ray():
            service = partial(ReplayService, name="it", batches_per_call=1, calls_in_flight=1)
            sizes = {"frames_per_batch": 8, "warmup_frames": 16, "frames_per_update": 8, "updates_per_epoch": 1}
            data = replay_data(source=service, checkpoint_buffer="none", total_frames=-1, **sizes)
            fit(tmp_path / str(number), data, max_epochs=1, strategy=strategy)
            frames.append(data.frames)
    assert frames == [16, 32]
    assert strategies[1].decisions[:2] == [True, True]


def test_single_rank_yields_all_rollouts_without_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", None)
    assert list(rollouts_of_all_ranks([3], None)) == [3]  # type: ignore[list-item]
