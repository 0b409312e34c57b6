"""Buffers of rollouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import NonTensorStack
from torchrl.data import TensorDictReplayBuffer

from contracts import documented
from contracts.part import SAVED, Part, Refusal
from contracts.refusals import no_hooks, no_tensordict
from kit.documented import path_step
from kit.rollouts import both_values, linear_actor, make_rollout
from kit.seeds import generator
from kit.states import GONE
from torchrl_lightning import (
    GAEBuffer,
    MinibatchSampler,
    PPOBuffer,
    RolloutBuffer,
    RolloutStorage,
    RolloutWriter,
    VanillaOnPolicyBuffer,
    VTraceBuffer,
)


def build(seed: int, kind: Any = GAEBuffer, size: int = 5, **settings: Any) -> Any:
    return kind(size, critic=both_values(), generator=generator(seed), **settings)


def steps(start: int, length: int = 5, envs: int = 3) -> Any:
    """A rollout with rewards of both kinds."""
    data = make_rollout(length, envs, seed=start).exclude("action_log_prob", "collector")
    data["observation"] = data["observation"] + start
    data["next", "intrinsic_reward"] = torch.rand(envs, length, 1, generator=generator(start))
    return data


def collect(buffer: Any, start: int) -> None:
    """A rollout, estimated; what is left of the last one goes."""
    buffer.empty()
    buffer.insert_data_slice(steps(start))
    buffer.before_gradients()


def learn(buffer: Any) -> Any:
    return [batch.exclude("index") for batch in buffer.generate_batches(2)]


def with_another_entry(buffer: Any) -> Any:
    buffer.insert_data_slice(make_rollout(surprise=torch.zeros(5, 3)))
    return buffer


def rollout(kind: Any, **settings: Any) -> Part:
    """A row of a buffer of rollouts."""
    return Part(
        make=partial(build, kind=kind, **settings),
        fill=collect,
        ask=learn,
        within=("consumed", "schema_version"),
        empty=(RuntimeError, "empty"),
    )


def spoiled(says: str, spoil: Callable[[Any], Any], error: type[Exception] = ValueError) -> Refusal:
    """A rollout that is refused."""
    return Refusal(says, lambda buffer: buffer.insert_data_slice(spoil(steps(7))), error=error)


REWARD, TERMINATED = ("next", "reward"), ("next", "terminated")
NAN = torch.zeros(3, 5, 1).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(torch.nan))
TEXT = NonTensorStack(*[NonTensorStack(*"abcde") for _ in range(3)])
REFUSED = (
    spoiled("1 of 15 values are NaN", lambda data: data.set(REWARD, NAN)),
    spoiled("bool", lambda data: data.set(TERMINATED, torch.zeros(3, 5, 1)), error=TypeError),
    spoiled("Add it: boolean", lambda data: data.exclude(TERMINATED), error=KeyError),
    spoiled("next", lambda data: data.exclude("next"), error=KeyError),
    spoiled("'action' is .*float32, stored is .*int64", lambda data: data.set("action", torch.zeros(3, 5))),
    spoiled(r"'observation' is \[7\]", lambda data: data.set("observation", torch.zeros(3, 5, 7))),
    spoiled("'action' is missing", lambda data: data.exclude("action")),
    spoiled("'surprise' is new", lambda data: data.set("surprise", torch.zeros(3, 5))),
    spoiled("'surprise' is a NonTensorStack; a buffer", lambda data: data.set("surprise", TEXT), error=TypeError),
    spoiled("5 steps of 0 environments", lambda data: data[:0]),
    spoiled("0 steps of 3 environments", lambda data: data[:, :0]),
    spoiled("Expected a TensorDict, or a dict .* got a Tensor", lambda data: data["observation"], error=TypeError),
    spoiled("6 steps does not fit into size=5", lambda data: steps(7, 6)),
    spoiled("Expected 3 environments, got 4", lambda data: steps(7, 5, 4)),
    Refusal("time_dim", lambda buffer: buffer.extend(steps(7).contiguous().rename(None, None))),
    Refusal("3.*size=5.*5", lambda buffer: buffer.extend(steps(7, 3))),
    Refusal("size=5", lambda buffer: buffer.insert_transition(steps(7).transpose(0, 1)[0])),
)

gae = rollout(GAEBuffer).but(
    refuses=REFUSED,
    within=("storage", "sampler", "transforms", "consumed", "schema_version"),
    foreign={
        "size=5.*size=6": partial(build, 0, size=6),
        "num_envs=3": partial(build, 0, num_envs=4),
        "surprise": lambda: with_another_entry(build(0)),
        "gamma": partial(build, 0, gamma_intrinsic=0.5),
    },
    edited={
        "by=": (("sampler", "by"), "environments"),
        "lacks sampler": (("sampler",), GONE),
        "num_steps": (("storage", "num_steps"), GONE),
        "'num_steps' is 6": (("storage", "num_steps"), 6),
        "advantage": (("storage", "added", "advantage"), torch.zeros(2, 3, 1)),
        "'is_init' is a tensor": (("storage", "tail", "is_init"), torch.zeros(7, 1)),
        "'generator' is not a state of a random generator on cpu .*size": (
            ("sampler", "generator"),
            torch.zeros(3, dtype=torch.uint8),
        ),
        "'generator' is not a state": (("sampler", "generator"), None),
        "transforms": (("transforms",), {"weight": torch.zeros(2)}),
        "mean": (("intrinsic", "mean"), GONE),
    },
)


def vtrace(seed: int) -> VTraceBuffer:
    return build(seed, VTraceBuffer, actor=linear_actor())


def collect_with_log_prob(buffer: Any, start: int) -> None:
    buffer.empty()
    buffer.insert_data_slice(make_rollout(seed=start))
    buffer.before_gradients()


def walk_paths(buffer: PPOBuffer, start: int) -> None:
    """Steps of which each third ends its path; the last path is open."""
    for number in range(start, start + 4):
        buffer.store(path_step(number, number / 3, number / 7, done=number % 3 == 2))
        if number % 3 == 2:
            buffer.finish_path()


def close_path(buffer: PPOBuffer) -> Any:
    if buffer.path_length:
        buffer.finish_path(2.0)
    return buffer.sample_batch()


def theirs(seed: int) -> TensorDictReplayBuffer:
    parts = {"storage": RolloutStorage(5), "writer": RolloutWriter(), "sampler": MinibatchSampler()}
    return TensorDictReplayBuffer(**parts, dim_extend=0, batch_size=4, generator=generator(seed))


def extend(buffer: TensorDictReplayBuffer, start: int) -> None:
    buffer.empty()
    buffer.extend(make_rollout(seed=start))


ROLLOUTS = {
    "rollouts in TorchRL's buffer": Part(
        make=theirs,
        fill=extend,
        ask=lambda buffer: [buffer.sample()["next", "reward"] for _ in range(3)],
        ways=SAVED,
        ours=False,
    ),
    "GAEBuffer": gae,
    "RolloutBuffer": rollout(RolloutBuffer),
    "VanillaOnPolicyBuffer": rollout(VanillaOnPolicyBuffer),
    "VTraceBuffer": rollout(VTraceBuffer).but(make=vtrace, fill=collect_with_log_prob),
    "PPOBuffer": Part(
        make=lambda seed: PPOBuffer(1, 1, 9, 2, generator=generator(seed)),
        fill=walk_paths,
        ask=close_path,
        within=("paths",),
        refuses=(
            *documented.PATHS,
            *no_tensordict(lambda ours, data: ours.writer.add(data)),
            no_hooks(lambda ours: ours),
        ),
        empty=(ValueError, "batch_size must be at most 0.*got 2"),
        foreign={"size=9.*size=8": partial(PPOBuffer, 1, 1, 8, 2)},
    ),
}
