"""Sums over episodes restart if a user's collector cuts trajectories without an end flag."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from kit.actor_critic import fit as fit_rollouts
from kit.actor_critic import rollouts
from kit.replay import fit as fit_replay
from kit.replay import replay_data
from torchrl_lightning import ExperienceBuffer, GymnasiumCollector, RingStorage
from torchrl_lightning.datamodules._run.episode_statistics import FinishedEpisodes

ENVS, STEPS = 2, 6


class Cutting:
    """Yield rollouts with reward 1 in each step, and with scripted ends and cuts.

    Args:
        policy: the acting policy.
        how: the sign of a cut.
        data: a list with the DataModule.
    """

    def __init__(self, policy: Any, how: str, data: list[Any]) -> None:
        self.how, self.data = how, data
        self.inner = GymnasiumCollector("CartPole-v1", policy, num_envs=ENVS, frames_per_batch=ENVS * STEPS, seed=0)
        self.done: list[TensorDictBase] = []
        self.cuts: list[Any] = []

    def __iter__(self) -> Iterator[TensorDictBase]:
        number, ids, offset = 0, torch.arange(ENVS), 0.0
        for rollout in self.inner:
            rows = rollout.clone()
            step, env = torch.arange(number, number + STEPS).expand(ENVS, STEPS), torch.arange(ENVS).unsqueeze(1)
            done = (step + 3 * env) % 11 == 10
            cut = (step + env) % 7 == 4
            if self.how not in ("ids", "is_init"):  # other cuts are only visible at the first row of a write
                cut = (step % (2 * STEPS) == 0) & (step > 0)
            for name in ("done", "truncated"):
                rows["next", name] = done.unsqueeze(-1)
            rows["next", "terminated"] = torch.zeros_like(done).unsqueeze(-1)
            rows["next", "reward"] = torch.ones(ENVS, STEPS, 1)
            begins = cut | torch.cat([torch.zeros(ENVS, 1).bool(), done[:, :-1]], 1)
            rows["is_init"] = (begins if self.how == "is_init" else begins & False).unsqueeze(-1)
            del rows["collector"]
            if self.how == "ids":
                moved = ids.unsqueeze(1) + ENVS * begins.long().cumsum(1)
                rows["collector", "traj_ids"] = moved
                ids = moved[:, -1] + ENVS * done[:, -1].long()
            if self.how == "cut()" and bool(cut.any()) and self.data[0].buffer is not None:
                self.data[0].buffer.writer.cut()
            if self.how == "successors":
                offset += 1000.0 * bool(cut.any())
                rows["observation"] = torch.arange(4.0) + step.unsqueeze(-1) + offset
                rows["next", "observation"] = rows["observation"] + 1
            self.done.append(done)
            self.cuts.append(cut)
            number += STEPS
            yield rows

    def shutdown(self) -> None:
        self.inner.shutdown()

    def brute(self, gamma: float) -> tuple[list[int], torch.Tensor]:
        """Compute the lengths of the finished episodes, and all discounted sums, in a plain loop."""
        done, cut = torch.cat(self.done, 1), torch.cat(self.cuts, 1)
        lengths, sums = [], []
        for env in range(ENVS):
            length, total = 0, 0.0
            for step in range(done.shape[1]):
                if cut[env, step]:
                    length, total = 0, 0.0
                length, total = length + 1, gamma * total + 1.0
                sums.append(total)
                if done[env, step]:
                    lengths.append(length)
                    length, total = 0, 0.0
        return sorted(lengths), torch.tensor(sums, dtype=torch.float64)


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the lengths of the counted episodes."""
    found: list[int] = []
    summary = FinishedEpisodes.summary

    def noting(self: FinishedEpisodes) -> dict[str, float]:
        if ended := self.state_dict()["finished"]:
            returns, lengths = ended
            assert returns.equal(lengths.double())
            found.extend(lengths.tolist())
        return summary(self)

    monkeypatch.setattr(FinishedEpisodes, "summary", noting)
    return found


def uneven(num_envs: int) -> ExperienceBuffer:
    return ExperienceBuffer(storage=RingStorage(400), num_envs=num_envs)


def check(data: Any, collector: Cutting, finished: list[int], gamma: float) -> None:
    data._episodes.summary()
    lengths, sums = collector.brute(gamma)
    assert len(lengths) > 6
    assert sorted(finished) == lengths
    normalization = data._normalization
    normalization.advance()
    moments = normalization._scale.moments
    assert moments.count == len(sums)
    assert moments.mean.item() == pytest.approx(sums.mean().item())
    assert moments.variance.item() == pytest.approx(sums.var(correction=0).item())


def build(makers: list[Cutting], how: str, holder: list[Any], policy: Any) -> Cutting:
    makers.append(Cutting(policy, how, holder))
    return makers[-1]


@pytest.mark.parametrize("how", ["ids", "is_init", "successors", "cut()"])
def test_replay_run(how: str, finished: list[int], tmp_path: Any) -> None:
    holder: list[Any] = []
    makers: list[Cutting] = []
    data = replay_data(
        uneven, collector=partial(build, makers, how, holder), num_envs=ENVS, frames_per_batch=ENVS * STEPS,
        normalize_reward=True, warmup_frames=120, updates_per_epoch=6,
    )  # fmt: skip
    holder.append(data)
    module, _ = fit_replay(tmp_path, data, max_epochs=6)
    check(data, makers[0], finished, module.gamma)


@pytest.mark.parametrize("how", ["ids", "is_init"])
def test_on_policy_run(how: str, finished: list[int], tmp_path: Any) -> None:
    holder: list[Any] = []
    makers: list[Cutting] = []
    data = rollouts(
        collector=partial(build, makers, how, holder), num_envs=ENVS, frames_per_batch=ENVS * STEPS,
        mini_batch_size=ENVS * STEPS, num_epochs=1, normalize_reward=True,
    )  # fmt: skip
    holder.append(data)
    fit_rollouts(tmp_path, data, max_epochs=12)
    check(data, makers[0], finished, data.buffer.gamma)
