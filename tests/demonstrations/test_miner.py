"""Episodes of the agent become demonstrations, whatever their ends, the rollouts' and the replays' between them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded

from kit.counting import CountingEnv, still_policy
from kit.files import through_file
from torchrl_lightning import (
    Demonstration,
    DemonstrationMiner,
    DemonstrationReplay,
    DemonstrationSampler,
    DemonstrationStorage,
    DemonstrationWriter,
    EnvironmentSpecs,
    GymnasiumCollector,
)

KEYS = ["observation", ("inner", "vector")]
SPECS = EnvironmentSpecs(
    Composite(observation=Bounded(0, 255, (1,), dtype=torch.uint8), inner=Composite(vector=Unbounded((2,)))),
    Categorical(1000),
    1,
)
ENVS = 3


class Recorded(DemonstrationWriter):
    """Keeps a list of what it was offered."""

    def __init__(self) -> None:
        super().__init__(DemonstrationStorage(20), reward_threshold=2.0)
        self.seen: list[Any] = []

    def add(self, episode: Demonstration) -> Any:
        steps, last = episode.steps, episode.last_observation
        assert last is not None
        shown = (steps["observation"], steps["inner", "vector"], steps["action"], episode.rewards, last["observation"])
        self.seen.append((episode.name, episode.value, *(value.tolist() for value in shown)))
        return super().add(episode)

    def refresh(self, demonstration: Demonstration, value: float) -> bool:
        self.seen.append((demonstration.serial, value))
        return super().refresh(demonstration, value)


def episodes(steps: int, seed: int) -> TensorDict:
    """A rollout ``[T, N]`` of random episodes, of which some are replayed and some are cut by a reset."""
    random = np.random.default_rng(seed)
    done, starts, serials = (np.zeros((steps, ENVS, 1), dtype) for dtype in (bool, bool, np.int64))
    for env in range(ENVS):
        begins, serial = env > 0, -1
        for t in range(steps):
            begins = begins or random.random() < 0.02
            if begins:
                serial = int(random.integers(5)) if random.random() < 0.4 else -1
            done[t, env], starts[t, env], serials[t, env] = random.random() < 0.2, begins, serial
            begins = bool(done[t, env, 0])
    count = torch.arange(steps * ENVS).view(steps, ENVS, 1)
    entries = {
        "observation": count.to(torch.uint8),
        "inner": {"vector": torch.randn(steps, ENVS, 2)},
        "action": count.squeeze(-1),
        "state_value": torch.randn(steps, ENVS, 1),
        "is_init": torch.from_numpy(starts),
        "demo": {"serial": torch.from_numpy(serials)},
        "next": {
            "observation": (count + 1).to(torch.uint8),
            "inner": {"vector": torch.randn(steps, ENVS, 2)},
            "reward": torch.randint(3, (steps, ENVS, 1)).float(),
            "done": torch.from_numpy(done),
        },
    }
    return TensorDict(entries, [steps, ENVS], names=["time", None])


def by_hand(rollout: TensorDict, storage: DemonstrationStorage, writer: Recorded) -> None:
    """Step by step, what the miner does by episodes."""
    running: dict[int, list[int]] = {}
    for t in range(len(rollout)):
        for env in range(ENVS):
            row = rollout[t, env]
            if row["is_init"]:
                running[env] = []
            if env in running:
                running[env].append(t)
                if row["next", "done"]:
                    times = running.pop(env)
                    part = rollout[times, env]
                    value, serial = part["state_value"].max().item(), row["demo", "serial"].item()
                    if serial < 0:
                        steps = part.select(*KEYS, "action", ("next", "reward"))
                        name = f"episode {sum(len(each) > 2 for each in writer.seen) + 1}"
                        writer.add(Demonstration(steps, row["next"].select(*KEYS), value=value, name=name))
                    elif (kept := storage.find(serial)) is not None:
                        writer.refresh(kept, value)


@pytest.mark.parametrize("seed", range(4))
def test_mining_equals_a_plain_loop_over_episodes(seed: int) -> None:
    torch.manual_seed(seed)
    whole, expected = episodes(60, seed), Recorded()
    by_hand(whole, expected.storage, expected)
    found = Recorded()
    miner = DemonstrationMiner(found, ENVS, specs=SPECS)
    begin = 0
    for length in (1, 7, 0, 20, 3, 29):
        part = whole[begin : begin + length].clone()
        part.names = ["time", None]
        if length:
            miner.mine(part if length % 2 else part.transpose(0, 1))
        part.apply_(lambda value: value.fill_(1))  # the memory is written again
        begin += length
        restored = DemonstrationMiner(found, ENVS, specs=SPECS)
        restored.load_state_dict(through_file(miner.state_dict()))
        miner = restored
    assert found.seen == expected.seen
    assert len(found.seen) > 15
    assert any(len(each) == 2 for each in found.seen)
    assert [each.value for each in found.storage.value_demonstrations] == [
        each.value for each in expected.storage.value_demonstrations
    ]


def test_collected_run_with_replays() -> None:
    storage = DemonstrationStorage(5)
    writer = DemonstrationWriter(storage, reward_threshold=100.0)
    replay = DemonstrationReplay(storage, DemonstrationSampler(0.0, 1.0), 2)
    collector = GymnasiumCollector(
        lambda: CountingEnv(length=4), still_policy(), num_envs=2, frames_per_batch=6, replay=replay
    )
    miner = DemonstrationMiner(writer, 2)
    for shift in range(6):
        rollout = collector.rollout()
        rollout["state_value"] = rollout["observation"][..., -1:] + shift
        miner.mine(rollout)
    # Two episodes of each environment begin in the first rollout; later there is something to replay.
    assert [each.total_reward for each in storage.value_demonstrations] == [10.0] * 4
    first = storage.value_demonstrations[0]
    assert first.steps["observation"][:, -1].tolist() == [0, 1, 2, 3]
    assert first.last_observation is not None
    assert first.last_observation["observation"][-1] == 4
    assert max(each.value for each in storage.value_demonstrations) >= 6
    assert [each.serial for each in storage.value_demonstrations] == [0, 1, 2, 3]


def test_rollout_without_values_refreshes_no_demonstration() -> None:
    torch.manual_seed(0)
    writer = Recorded()
    miner = DemonstrationMiner(writer, ENVS, specs=SPECS)
    miner.mine(episodes(60, 0).exclude("state_value"))
    assert {each[1] for each in writer.seen} == {-math.inf}
    assert all(len(each) > 2 for each in writer.seen)


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("lengths", [(30,), (7, 1, 12, 10)])
def test_cut_trajectories_are_skipped(starts: bool, lengths: tuple[int, ...]) -> None:
    data = episodes(30, 3)
    data["demo", "serial"].fill_(-1)
    steps = torch.arange(30).unsqueeze(1) + torch.arange(ENVS)
    cut, done = steps % 6 == 5, steps % 4 == 3
    data["next", "done"] = done.unsqueeze(-1)
    begins = torch.cat([torch.ones(1, ENVS, dtype=torch.bool), done[:-1]])
    data["collector", "traj_ids"] = (begins | cut).long().cumsum(0)
    if starts:
        data["is_init"] = begins.unsqueeze(-1)
    else:
        del data["is_init"]
    found = Recorded()
    miner, begin = DemonstrationMiner(found, ENVS, specs=SPECS), 0
    for length in lengths:
        miner.mine(data[begin : begin + length].clone())
        begin += length
    expected = []
    for end in range(30):
        for env in range(ENVS):
            if done[end, env]:
                first = end
                while not (begins | cut)[first, env]:
                    first -= 1
                expected.append(data["action"][first : end + 1, env].tolist())
    assert len(expected) > 12
    assert [each[4] for each in found.seen] == expected
