"""Steps that a collector writes into the same memory each time reach the buffer as whole rollouts do."""

from __future__ import annotations

import os
import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import GRUModule

from kit.counting import RandomEnv, still_policy, vector_env
from torchrl_lightning import GymnasiumCollector, ReplayDataModule
from torchrl_lightning.replay import ExperienceBuffer, PrioritizedSampler, RingStorage, UniformSampler

ENVS, LENGTH = 4, 9


class Rollouts:
    """A collector of somebody else's: it yields the same rollouts, in memory of their own, and nothing more."""

    def __init__(self, collector: GymnasiumCollector) -> None:
        self.collector = collector

    def __iter__(self) -> Any:
        return iter(self.collector)

    def shutdown(self) -> None:
        self.collector.shutdown()


class Marks:
    """An attached entity: keeps which cells were written."""

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


def built(ours: bool, kind: str = "box", sampler: Any = UniformSampler, steps: int = 1, **kwargs: Any) -> Any:
    """A DataModule over environments whose episodes end, and its buffer of ``LENGTH`` steps."""
    env = vector_env("dict" if kind == "dict" else "box")

    def collector(policy: Any, *, seed: int | None = None, reset_at_each_batch: bool = False) -> Any:
        made = GymnasiumCollector(
            env, policy, frames_per_batch=ENVS * steps, seed=seed, reset_at_each_batch=reset_at_each_batch
        )
        return made if ours else Rollouts(made)

    def buffer(num_envs: int) -> ExperienceBuffer:
        return ExperienceBuffer(storage=RingStorage(ENVS * LENGTH), sampler=sampler(), num_envs=num_envs)

    data = ReplayDataModule(
        env,
        buffer=buffer,
        collector=collector,
        num_envs=ENVS,
        frames_per_batch=ENVS * steps,
        eval_env="CartPole-v1",
        seed=3,
        **kwargs,
    )
    data.setup("fit")
    data.marks = Marks()
    data.buffer.storage.attach(data.marks)
    return data


def collect(data: ReplayDataModule, module: Any, times: int) -> None:
    for _ in range(times):
        assert data._collect_frames(module, data.buffer)


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {path: state}
    return {name: leaf for key, value in state.items() for name, leaf in leaves(value, f"{path}/{key}").items()}


def assert_equal(first: Any, second: Any) -> None:
    first, second = leaves(first), leaves(second)
    assert first.keys() == second.keys()
    for name, mine in first.items():
        other = second[name]
        if isinstance(mine, Tensor):
            assert mine.dtype == other.dtype, name
            assert torch.equal(mine, other), name
        else:
            assert mine == other, name


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
def test_both_ways_leave_the_same_buffer(kind: str, kwargs: dict[str, Any], uneven: bool) -> None:
    results = []
    for ours in (True, False):
        data, module = built(ours, kind, **kwargs), SimpleNamespace(policy=POLICIES[kind]())
        collect(data, module, 3)
        assert data._writes_rows is ours
        if uneven:
            data.buffer.extend(data.buffer.storage.get(torch.tensor([1])), env_ids=torch.tensor([1]))
        collect(data, module, 25)  # the rings are full after nine steps
        if "sampler" in kwargs:
            data.buffer.update_priority(torch.arange(8), torch.rand(8, generator=torch.Generator().manual_seed(0)))
            collect(data, module, 1)
        counters = {"frames": data.frames, "cells": data.marks.cells}
        results.append([data.buffer.state_dict(), data._episodes.state_dict(), data._episodes.summary(), counters])
        assert data.buffer.sample(16)["next", "done"].dtype == torch.bool
        data.close()
    assert_equal(*({str(i): part for i, part in enumerate(result)} for result in results))


def test_what_keeps_its_rows_gets_rollouts_of_their_own() -> None:
    class Documented(ExperienceBuffer):
        def extend(self, data: Any, *args: Any, **kwargs: Any) -> Tensor:
            return super().extend(data, *args, **kwargs)

    module = SimpleNamespace(policy=still_policy())
    data = built(True)
    data.buffer = Documented(storage=RingStorage(ENVS * LENGTH), num_envs=ENVS)
    collect(data, module, 2)
    assert not data._writes_rows
    data.close()


class Breaking(RandomEnv):
    """Breaks at its seventh step, in the way that it was told."""

    broken: Any = None

    def step(self, action: Any) -> Any:
        self.made = getattr(self, "made", 0) + 1
        if self.made == 7:
            type(self).broken()
        return super().step(action)


def breaking(how: Any, buffer: ExperienceBuffer) -> tuple[ReplayDataModule, Any]:
    """A DataModule whose environment 1 breaks after environment 0 has made its step."""

    class Second(Breaking):
        broken = how

    made = iter([RandomEnv, Second])
    data = ReplayDataModule(
        lambda: next(made)(), buffer=lambda num_envs: buffer, num_envs=2, eval_env=RandomEnv, seed=0
    )
    data.setup("fit")
    return data, SimpleNamespace(policy=still_policy())


def check_whole(buffer: ExperienceBuffer) -> None:
    """Every stored step goes on from the one before, or begins an episode."""
    newest, length = int(buffer.writer.positions[0]), buffer.writer.length
    slots = torch.arange(max(0, newest - length), newest)[:, None] % length
    stored = buffer.storage.get((slots * 2 + torch.arange(2)).flatten())
    first, second = stored[2:], stored[:-2]
    begins = first["is_init"].squeeze(-1)
    assert torch.equal(first["observation"][~begins], second["next", "observation"][~begins])
    assert torch.equal(begins, second["next", "done"].squeeze(-1))


def interrupt() -> None:
    raise KeyboardInterrupt


def fail() -> None:
    raise ArithmeticError("broken")


@pytest.mark.parametrize("how", [interrupt, fail])
def test_a_step_that_fails_leaves_the_buffer_as_it_was(how: Any) -> None:
    data, module = breaking(how, ExperienceBuffer(storage=RingStorage(8), num_envs=2))
    collect(data, module, 6)
    before, marks = data.buffer.state_dict(), Marks()
    data.buffer.storage.attach(marks)
    with pytest.raises((KeyboardInterrupt, ArithmeticError)):
        collect(data, module, 1)
    assert_equal(data.buffer.state_dict(), before)
    assert marks.cells == []
    assert data.frames == 12
    check_whole(data.buffer)
    data.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_killed_in_a_step_leaves_whole_rows() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(8), num_envs=2)
    other, module = breaking(fail, buffer)
    collect(other, module, 1)
    other.close()
    buffer.share()
    child = os.fork()
    if not child:
        try:
            data, module = breaking(lambda: os.kill(os.getpid(), signal.SIGKILL), buffer)
            collect(data, module, 7)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(buffer.sample(16)) == 16
    assert buffer.writer.positions.tolist() == [7, 7]
    check_whole(buffer)
    buffer.storage.tree["observation"][1] += 1.0  # the check would see a torn row
    with pytest.raises(AssertionError):
        check_whole(buffer)
