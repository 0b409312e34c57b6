"""Where a demonstration plays, collectors see its steps in the place of the environment's, whoever's that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, InitTracker, ParallelEnv, SerialEnv, TransformedEnv

from kit.demonstrations import check_golden, golden_replay, stored
from kit.lines import Counting, Line, Scripted, imitator, line_collector, line_demo
from torchrl_lightning import Demonstration, DemonstrationActor, DemonstrationReplay, DemonstrationReplayTransform
from torchrl_lightning.collectors import TorchRLCollector

WAYS = pytest.mark.parametrize("way", ["Gymnasium", "TorchRL"])
PLAYED = [100.0, 101.0, 102.0, 103.0]


def collected(
    way: str, steps: int, demos: list[Demonstration], *script: int | None, num_envs: int = 1, **options: Any
) -> TensorDictBase:
    """Collect ``[N, T]`` along lines where demonstrations play as the script says."""
    replay = DemonstrationReplay(stored(*demos), Scripted(*script), num_envs, **options)
    if way == "Gymnasium":
        batch: TensorDictBase = line_collector(replay, num_envs, steps).rollout()
        return batch
    env = DemonstrationReplayTransform(replay).wrap(SerialEnv(num_envs, lambda: GymWrapper(Line())))
    env = TransformedEnv(env, InitTracker(), auto_unwrap=False)
    return env.rollout(steps, DemonstrationActor(imitator()), break_when_any_done=False)


@WAYS
def test_golden_sequence(way: str) -> None:
    golden, demonstration = golden_replay()
    row = collected(way, 12, [demonstration], None, 0)[0]
    check_golden(row, golden)
    # The first observation of the run begins an episode too, which theirs did not know.
    ends = golden["done_before"][1:].bool().tolist()
    assert row["is_init"].flatten().tolist() == [True, *ends]
    assert row["next", "terminated"].flatten().tolist()[:-1] == ends
    assert row["next", "observation"].flatten().tolist()[:7] == [1, 2, 3, 101, 102, 103, 103]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["GymnasiumCollector", "SerialEnv", "ParallelEnv", "TorchRLCollector", "Collector"])
def test_environments_that_replay_are_not_stepped(kind: str) -> None:
    def make() -> GymWrapper:
        return GymWrapper(Counting())

    # Building a collector of ours resets the environment, which draws too; what a script says is not taken back.
    script = (0, None, 0, None, 0, 0, None) if kind == "TorchRLCollector" else (0, None, 0, 0, None)
    replay = DemonstrationReplay(stored(line_demo()), Scripted(*script), 2)
    if kind == "GymnasiumCollector":
        batch = line_collector(replay, 2, 11, env=Counting).rollout()
    else:
        base = ParallelEnv(2, make, mp_start_method="fork") if kind == "ParallelEnv" else SerialEnv(2, make)
        env, policy = DemonstrationReplayTransform(replay).wrap(base), DemonstrationActor(imitator())
        if kind == "TorchRLCollector":
            batch = TorchRLCollector(env, policy, frames_per_batch=22, seed=0).rollout()
        elif kind == "Collector":
            made = Collector(env, policy, frames_per_batch=22, auto_register_policy_transforms=True)
            batch = next(iter(made))
        else:
            batch = env.rollout(11, policy, break_when_any_done=False)
        env.close()
    found = {key: batch[key].squeeze(-1).tolist() for key in ("observation", ("demo", "mask"), ("demo", "serial"))}
    assert found == {
        "observation": [[*PLAYED, *PLAYED, 0, 1, 2], [0, 1, 2, *PLAYED, 3, 4, 5, 6]],
        ("demo", "mask"): [[True] * 8 + [False] * 3, [False] * 3 + [True] * 4 + [False] * 4],
        ("demo", "serial"): [[0] * 8 + [-1] * 3, [-1] * 3 + [0] * 4 + [-1] * 4],
    }
    assert batch["action"][batch["demo", "mask"]].tolist() == [50.0, 51.0, 52.0, 53.0] * 3


@WAYS
@pytest.mark.parametrize(("last", "length"), [(7.0, 4), (None, 4), (7.0, 40)])
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_end_of_a_demonstration(way: str, last: float | None, length: int, ends: Any) -> None:
    following = collected(way, length, [line_demo(length, last=last)], 0, ends=ends)[0]["next"]
    seen = [float(100 + t) for t in range(length)]
    assert following["observation"].flatten().tolist() == [*seen[1:], seen[-1] if last is None else last]
    assert following["reward"].flatten().nonzero().flatten().tolist() == [length - 1]
    for name in ("terminated", "truncated", "done"):
        assert following[name].flatten().tolist() == [False] * (length - 1) + [name in (ends, "done")]


RECORDED = [
    ({}, (True, False)),
    ({"terminated": True, "truncated": False}, (True, False)),
    ({"terminated": False, "truncated": True}, (False, True)),
    ({"terminated": False, "truncated": False}, (False, True)),
]


@WAYS
def test_parallel_demonstrations_end_as_recorded(way: str) -> None:
    demos = [line_demo(last=7.0, **options) for options, _ in RECORDED]
    following = collected(way, 5, demos, 0, 1, 2, 3, None, num_envs=4)["next"]
    found = torch.cat([following["terminated"], following["truncated"]], -1)
    assert found[:, 3].tolist() == [[*ends] for _, ends in RECORDED]
    assert not found[:, :3].any()
    assert following["done"][:, :4, 0].tolist() == [[False, False, False, True]] * 4
