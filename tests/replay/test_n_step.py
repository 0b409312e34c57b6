"""TorchRL's n-step transform over rings, against returns computed step by step."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import MultiStepTransform

from torchrl_lightning.replay import ExperienceBuffer, RingStorage

GAMMA = 0.5


def rollout(envs: int, steps: int) -> TensorDict:
    generator = torch.Generator().manual_seed(envs * 100 + steps)
    number = torch.arange(envs).unsqueeze(1) * 100.0 + torch.arange(steps)
    terminated = torch.rand(envs, steps, 1, generator=generator) < 0.2
    truncated = (torch.rand(envs, steps, 1, generator=generator) < 0.15) & ~terminated
    following = {
        "observation": number.unsqueeze(-1) + 0.5,
        "reward": torch.rand(envs, steps, 1, generator=generator),
        "done": terminated | truncated,
        "terminated": terminated,
        "truncated": truncated,
    }
    return TensorDict({"number": number, "next": following}, [envs, steps], names=[None, "time"])


def expected(data: TensorDict, env: int, step: int, n: int) -> tuple[float, float, bool, int]:
    """N-step reward, next observation, whether that is terminal, and how many steps it is ahead."""
    total, row = 0.0, data["next"][env]
    for ahead in range(n):
        total += GAMMA**ahead * float(row["reward"][step + ahead])
        if row["done"][step + ahead] or ahead == n - 1:
            last = step + ahead
            return total, float(row["observation"][last]), bool(row["terminated"][last]), ahead + 1
    raise AssertionError


def buffer(n: int, envs: int, size: int = 120) -> ExperienceBuffer:
    ours = ExperienceBuffer(storage=RingStorage(size), num_envs=envs, batch_size=8)
    ours.append_transform(MultiStepTransform(n_steps=n, gamma=GAMMA))
    return ours


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("pieces", [[30], [1] * 30, [1, 7, 2, 1, 12, 3, 4]])
@pytest.mark.parametrize("form", ["named", "time-major", "flat"])
def test_as_computed_step_by_step(n: int, envs: int, pieces: list[int], form: str) -> None:
    data, ours, begin = rollout(envs, 30), buffer(n, envs), 0
    before = data.clone()
    for steps in pieces:
        piece = data[:, begin : begin + steps]
        begin += steps
        if form == "named":
            ours.extend(piece)
        elif form == "time-major":
            ours.extend(TensorDict(piece.transpose(0, 1).to_dict(), [steps, envs]), time_dim=0)
        else:
            for step in piece.unbind(1):
                ours.extend(step)
    assert ours.writer.positions.tolist() == [30 - n] * envs
    stored = ours[:].reshape(-1, envs)
    for env in range(envs):
        for step in range(30 - n):
            row = stored[step, env]
            reward, observation, terminated, ahead = expected(data, env, step, n)
            assert row["number"] == data["number"][env, step]
            assert float(row["next", "reward"]) == pytest.approx(reward)
            assert float(row["next", "observation"]) == observation
            assert bool(row["next", "terminated"]) == terminated
            assert int(row["steps_to_next_obs"]) == ahead
            assert float(row["gamma"]) == GAMMA**ahead
            for flag in ("done", "truncated"):
                assert row["next", flag] == data["next", flag][env, step]
    assert (data == before).all()


def test_a_failed_write_and_an_emptied_buffer_leave_no_steps_behind() -> None:
    ours, data = buffer(2, 2), rollout(2, 12)
    ours.extend(data[:, :6])
    with pytest.raises(ValueError, match="all environments at once"):
        ours.extend(data[:1, 6:], env_ids=torch.tensor([0]))
    with pytest.raises(ValueError, match="all environments at once"):
        ours.extend(data[:, 6:], env_ids=torch.tensor([1, 0]))
    wrong = data[:, 6:].clone()
    wrong["number"] = wrong["number"].double()
    with pytest.raises((ValueError, RuntimeError)):
        ours.extend(wrong)
    ours.extend(data[:, 6:])
    assert ours[:]["number"].reshape(-1, 2)[:, 1].tolist() == [100.0 + step for step in range(10)]
    ours.empty()
    ours.extend(data[:, 6:])
    assert ours[:]["number"].reshape(-1, 2)[:, 0].tolist() == [6, 7, 8, 9]
