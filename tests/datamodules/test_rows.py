"""Steps in the reused memory of a collector reach the buffer in the same way as whole rollouts."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import GRUModule

from kit.acting import collect
from kit.counting import CountingEnv, RandomEnv, still_policy, vector_env
from kit.replay import replay_data
from kit.states import differences
from torchrl_lightning import GymnasiumCollector, ReplayDataModule
from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.replay import ExperienceBuffer, PrioritizedSampler, RingStorage, UniformSampler

ENVS, LENGTH = 4, 9


class Rollouts(GymnasiumCollector):
    """A collector of a user that yields rollouts in separate memory."""

    def rollout(self) -> Any:
        return super().rollout()


class Lending(GymnasiumCollector):
    """A collector of a user that collects in the same way as our collector."""


class Marks:
    """An attached object that records the written cells."""

    def __init__(self) -> None:
        self.cells: list[int] = []

    def mark_update(self, index: Tensor, **_: Any) -> None:
        self.cells += index.tolist()


def random_policy(key: str = "observation", width: int = 3) -> TensorDictModule:
    torch.manual_seed(0)
    net = nn.Linear(width, 3)
    return TensorDictModule(
        lambda x: torch.distributions.Categorical(logits=net(x.flatten(1).float())).sample(),
        in_keys=[key],
        out_keys=["action"],
    )


def recurrent_policy() -> TensorDictSequential:
    torch.manual_seed(0)
    states = ["recurrent_state", "is_init"], ("next", "recurrent_state")
    body = GRUModule(3, 5, in_keys=["observation", *states[0]], out_keys=["embed", states[1]])
    head = TensorDictModule(lambda x: (x.sum(-1) * 1000).long() % 3, in_keys=["embed"], out_keys=["action"])
    forget = TensorDictModule(lambda x: x, in_keys=["embed"], out_keys=["_embed"])
    return TensorDictSequential(body, forget, head)


POLICIES = {"box": random_policy, "dict": partial(random_policy, "image", 4), "recurrent": recurrent_policy}


def built(collector: Any, kind: str = "box", sampler: Any = UniformSampler, steps: int = 1, **settings: Any) -> Any:
    """Build a DataModule with ending episodes and a buffer of ``LENGTH`` steps per environment."""

    def buffer(num_envs: int) -> ExperienceBuffer:
        return ExperienceBuffer(storage=RingStorage(ENVS * LENGTH), sampler=sampler(), num_envs=num_envs)

    shown = "dict" if kind == "dict" else "box"
    frames = dict.fromkeys(("frames_per_batch", "frames_per_update", "warmup_frames"), ENVS * steps)
    env, eval_env = vector_env(shown), partial(CountingEnv, kind=shown)
    make = partial(collector, env, frames_per_batch=ENVS * steps)
    given = {"buffer": buffer, "collector": make, "eval_env": eval_env, "num_envs": ENVS, **frames, **settings}
    data = replay_data(env=env, **given)
    data.setup("fit")
    data.marks = Marks()
    data.buffer.storage.attach(data.marks)
    return data


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[GymnasiumCollector]:
    """Return a list that receives the collectors with calls of ``reused_rows``."""
    asked, reused_rows = [], GymnasiumCollector.reused_rows

    def ask(self: GymnasiumCollector, *arguments: Any) -> Any:
        asked.append(self)
        return reused_rows(self, *arguments)

    monkeypatch.setattr(GymnasiumCollector, "reused_rows", ask)
    return asked


def prioritized() -> PrioritizedSampler:
    return PrioritizedSampler(ENVS * LENGTH, alpha=0.7, beta=0.5)


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("box", {}),
        ("dict", {}),
        ("recurrent", {}),
        ("box", {"sampler": prioritized}),
        ("box", {"steps": 4}),
        ("recurrent", {"steps": 3, "reset_at_each_batch": True}),
        ("box", {"steps": 2, "reset_at_each_batch": True}),
    ],
)
@pytest.mark.parametrize("uneven", [False, True])
def test_shared_memory_and_extend_leave_the_same_buffer(
    kind: str, kwargs: dict[str, Any], uneven: bool, streams: Any
) -> None:
    def write_one_step_more(data: ReplayDataModule) -> None:
        data.buffer.extend(data.buffer.storage.get(torch.tensor([1])), env_ids=torch.tensor([1]))

    results, lending = [], Lending if uneven else GymnasiumCollector
    for collector in (lending, Rollouts):
        data = built(collector, kind, **kwargs)
        # The rings are full after nine steps.
        collect(data, POLICIES[kind](), 28, {3: write_one_step_more} if uneven else None)
        returns = {name: value for name, value in data.metrics().items() if not name.startswith("time/")}
        results.append([data.buffer.state_dict(), data.state_dict()["ranks"], returns, data.marks.cells])
        assert data.buffer.sample(16)["next", "done"].dtype == torch.bool
        data.close()
    assert not differences(*results)
    assert [type(each) for each in streams] == [lending]


def test_buffer_that_keeps_rows_receives_owned_rollouts(streams: Any) -> None:
    class Documented(ExperienceBuffer):
        def extend(self, data: Any, *args: Any, **kwargs: Any) -> Tensor:
            return super().extend(data, *args, **kwargs)

    data = built(
        GymnasiumCollector, buffer=lambda num_envs: Documented(storage=RingStorage(ENVS * LENGTH), num_envs=num_envs)
    )
    collect(data, still_policy(), 2)
    assert not streams
    data.close()


class Breaking(RandomEnv):
    """Call ``broken`` at the seventh step."""

    broken: Any = None

    def step(self, action: Any) -> Any:
        self.made = getattr(self, "made", 0) + 1
        if self.made == 7:
            type(self).broken()
        return super().step(action)


def breaking(how: Any, buffer: ExperienceBuffer) -> ReplayDataModule:
    """Build a DataModule; its environment 1 breaks after environment 0 has made its step."""

    class Second(Breaking):
        broken = how

    made = iter([RandomEnv, Second])
    return replay_data(lambda num_envs: buffer, env=lambda: next(made)(), eval_env=RandomEnv, frames_per_update=2.0)


def check_whole(buffer: ExperienceBuffer) -> None:
    """Check that every stored step continues the step before or begins an episode."""
    newest, length = int(buffer.writer.positions[0]), buffer.writer.length
    slots = torch.arange(max(0, newest - length), newest)[:, None] % length
    stored = buffer.storage.get((slots * 2 + torch.arange(2)).flatten())
    first, second = stored[2:], stored[:-2]
    begins = first["is_init"].squeeze(-1)
    assert torch.equal(first["observation"][~begins], second["next", "observation"][~begins])
    assert torch.equal(begins, second["next", "done"].squeeze(-1))


def leave() -> None:
    raise SystemExit


def fail() -> None:
    raise ArithmeticError("broken")


@pytest.mark.parametrize("how", [leave, fail])
def test_step_that_fails_leaves_the_buffer_as_it_was(how: Any) -> None:
    data, kept, marks = breaking(how, ExperienceBuffer(storage=RingStorage(8), num_envs=2)), [], Marks()

    def keep(data: ReplayDataModule) -> None:
        data.buffer.storage.attach(marks)
        kept.append(data.buffer.state_dict())

    with pytest.raises(EnvironmentFault, match=r"At step 0 of the rollout, environment 1 raised \w+ in step"):
        collect(data, still_policy(), 7, {6: keep})
    assert not differences(data.buffer.state_dict(), *kept)
    assert marks.cells == []
    assert data.frames == 12
    check_whole(data.buffer)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_process_that_is_killed_in_a_step_leaves_whole_rows() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(8), num_envs=2)
    collect(breaking(fail, buffer), still_policy(), 1)
    buffer.share()
    child = os.fork()
    if not child:
        try:
            collect(breaking(lambda: os.kill(os.getpid(), signal.SIGKILL), buffer), still_policy(), 7)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(buffer.sample(16)) == 16
    assert buffer.writer.positions.tolist() == [7, 7]
    check_whole(buffer)
    buffer.storage.tree["observation"][1] += 1.0  # the check must find a torn row
    with pytest.raises(AssertionError):
        check_whole(buffer)
