"""Copies of what environments return."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple
from functools import partial
from types import MappingProxyType
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.vector import SyncVectorEnv

from kit.careless import Careless
from torchrl_lightning import EnvironmentRecipe
from torchrl_lightning.datamodules._run.evaluation import view_of
from torchrl_lightning.environments import make_vector_env
from torchrl_lightning.environments.copies import copied, copy_beneath_wrappers
from torchrl_lightning.environments.env_errors import GuardedCall, guard_calls

Point = namedtuple("Point", "x y")


def arrays_in(value: Any) -> list[Any]:
    if isinstance(value, dict | OrderedDict | MappingProxyType):
        return [array for entry in value.values() for array in arrays_in(entry)]
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [array for entry in value for array in arrays_in(entry)]
    return [value] if isinstance(value, np.ndarray | torch.Tensor) else []


@pytest.mark.parametrize(
    "value",
    [
        np.arange(3),
        np.array(2.0),
        np.array([1, 2], np.float16),
        {"a": np.zeros(2), "b": {"c": [np.ones(1), "text"]}},
        OrderedDict(a=np.zeros(2)),
        MappingProxyType({"a": np.zeros(2)}),
        (np.zeros(2), [np.ones(2)]),
        Point(np.zeros(2), 3),
        np.array([np.zeros(2), None, [np.ones(3)]], object),
        torch.zeros(3),
        [],
    ],
    ids=repr,
)
def test_copied_arrays_share_no_memory(value: Any) -> None:
    copy = copied(value)
    copied_arrays, arrays = arrays_in(copy), arrays_in(value)
    assert len(copied_arrays) == len(arrays)
    for copied_array, array in zip(copied_arrays, arrays, strict=True):
        assert type(copied_array) is type(array)
        assert copied_array.dtype == array.dtype
        assert np.array_equal(copied_array, array)
        assert not np.shares_memory(np.asarray(copied_array), np.asarray(array))
    assert isinstance(copy, Point) == isinstance(value, Point)


def test_other_values_are_the_same_objects() -> None:
    env, number = Careless(), np.float32(3)
    info = {"env": env, "number": number, "text": "a", "nothing": None, "function": copied}
    assert all(copied(info)[name] is value for name, value in info.items())


def test_tensor_that_needs_gradients_is_copied() -> None:
    value = torch.ones(2, requires_grad=True) * 2
    assert copied({"loss": value})["loss"].tolist() == [2, 2]


def test_step_is_wrapped_once_and_survives_copies() -> None:
    env = Careless()
    guard_calls(env, 0)
    step = env.step
    guard_calls(env, 0)
    assert env.step is step
    for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        other.reset(seed=0)
        assert isinstance(other.step, GuardedCall)
        other.step(0)
        assert (other.t, env.t) == (1, 0)


def test_copies_are_inserted_beneath_wrappers_once_and_only_where_needed() -> None:
    env = wrappers.FrameStackObservation(wrappers.RepeatAction(Careless(action="box"), 2), 3)
    for _ in range(2):
        copy_beneath_wrappers(env)
    names = []
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        names.append(type(layer).__name__)
        layer = layer.env
    assert names == ["FrameStackObservation", "FreshObservations", "RepeatAction", "FreshActions"]
    plain = wrappers.RepeatAction(wrappers.ClipReward(Careless(), 0, 1), 2)  # whose actions are numbers
    copy_beneath_wrappers(plain)
    assert isinstance(plain.env, wrappers.ClipReward)
    assert isinstance(EnvironmentRecipe(Careless, action_repeat=2)().env, Careless)


def test_evaluation_sees_no_difference_by_inserted_copies() -> None:
    stack = partial(wrappers.FrameStackObservation, stack_size=2)
    ours = view_of(make_vector_env(Careless, 2, wrappers=[stack]))
    theirs = view_of(SyncVectorEnv([lambda: stack(Careless())]))
    assert ours.wrappers == theirs.wrappers == ["Careless", "FrameStackObservation"]
    assert ours.arguments == theirs.arguments


def test_environment_with_inserted_copies_can_be_made_by_its_spec() -> None:
    env = wrappers.FrameStackObservation(gymnasium.make("CartPole-v1"), 2)
    copy_beneath_wrappers(env)
    assert env.spec is not None
    again = gymnasium.make(env.spec)
    assert again.reset(seed=0)[0].tolist() == env.reset(seed=0)[0].tolist()


@pytest.mark.parametrize("terminated", [False, True])
def test_last_step_of_an_episode_is_a_copy_however_it_ends(terminated: bool) -> None:
    class Reusing(gymnasium.Env[Any, Any]):
        memory, t = np.zeros(1), 0

        def step(self, action: Any) -> Any:
            self.t += 1
            self.memory[:] = self.t
            return self.memory, 0.0, terminated and self.t == 2, not terminated and self.t == 2, {}

    env = Reusing()
    guard_calls(env, 0)
    assert env.step(0)[0] is env.memory
    last = env.step(0)[0]
    env.memory[:] = 9
    assert last.tolist() == [2]
