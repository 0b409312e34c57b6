"""Check before collection that batch sizes fit a recurrent policy or windows of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict.utils import NestedKey
from torchrl.data import RandomSampler, SamplerWithoutReplacement

from torchrl_lightning._core.protocols import LearnerApi, PolicyApi, SamplerApi
from torchrl_lightning.environments.policy_calls import recurrent_states
from torchrl_lightning.replay import PrioritizedSampler, SequenceSampler, UniformSampler
from torchrl_lightning.rollout.values import is_recurrent

DEFAULT_MINI_BATCHES = 4
HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "training_step")


def has_recurrent_states(policy: Any, keys: Sequence[NestedKey]) -> bool:
    """Return whether a policy reads or declares one of the recurrent states ``keys``."""
    return is_recurrent([*PolicyApi.of(policy).in_keys, *recurrent_states(policy, 1)], keys)


def passes_batches_unchanged(data: Any, learner: Any) -> bool:
    """Return whether batches reach the loss unchanged, without a user's hook that may reshape them."""
    hooks = [getattr(part, name, None) for part in (data, learner) for name in HOOKS]
    packages = (str(hook.__module__).partition(".")[0] for hook in hooks if hook is not None)
    return all(package in ("torchrl_lightning", "lightning", "pytorch_lightning") for package in packages)


def has_recurrent_policy(learner: Any, keys: Sequence[NestedKey]) -> bool:
    """Return whether a learner's policy is recurrent, according to the network's description or the built policy."""
    api = LearnerApi.of(learner)
    if api.has_memory:
        return True
    policy = None if api.is_built is False else api.policy
    return policy is not None and has_recurrent_states(policy, keys)


def check_whole_environments(num_envs: int, steps: int, number: int | None, size: int | None) -> None:
    """Raise a ValueError if mini-batches cannot consist of whole environments, which a recurrent policy needs.

    Args:
        num_envs: environments of a rollout.
        steps: steps of each environment.
        number: the user's ``num_mini_batch``.
        size: the user's ``mini_batch_size``.

    Examples:
        >>> check_whole_environments(4, 16, 3, None)
        Traceback (most recent call last):
        ValueError: num_mini_batch=3 must divide num_envs=4: a mini-batch of a recurrent policy contains \
complete environments. Choose 1, 2 or 4.
    """
    reason = "a mini-batch of a recurrent policy contains complete environments"
    divisors = [count for count in range(1, num_envs + 1) if num_envs % count == 0]
    if number is not None and size is not None:
        if number * size > num_envs:
            raise ValueError(
                f"num_mini_batch={number} times mini_batch_size={size} must be at most num_envs={num_envs}: {reason}, "
                "and with both settings mini_batch_size counts environments. Leave one of them out."
            )
        return
    frames = num_envs * steps
    batches = DEFAULT_MINI_BATCHES if number is None else number
    batches = batches if size is None else -(-frames // size)
    if batches in divisors:
        return
    if number is not None:
        raise ValueError(
            f"num_mini_batch={number} must divide num_envs={num_envs}: {reason}. Choose {_join(divisors)}."
        )
    if size is not None:
        sizes = [frames // count for count in reversed(divisors)]
        raise ValueError(
            f"mini_batch_size={size} must be the steps of complete environments, {steps} each, for a number of "
            f"mini-batches that divides num_envs={num_envs}: {reason}. Choose {_join(sizes)}."
        )
    largest = max(count for count in divisors if count <= batches)
    raise ValueError(
        f"num_envs={num_envs} must be a multiple of {batches}, the default of num_mini_batch: {reason}. Set "
        f"num_mini_batch={largest}, or change num_envs."
    )


def check_windows(buffer: Any, steps: int | None, recurrent: bool) -> None:
    """Raise a ValueError if the sampler cannot draw windows that the learner needs.

    Args:
        buffer: the replay buffer.
        steps: steps of each environment before the first update; None if unknown.
        recurrent: whether a recurrent network, which needs sequences, receives the batches unchanged.
    """
    sampler, length = buffer.sampler, None
    kind = type(sampler).__name__
    if isinstance(sampler, SequenceSampler | PrioritizedSampler) and "batch_length" not in buffer.sample_options:
        length = sampler.batch_length
    known = SequenceSampler, PrioritizedSampler, UniformSampler, RandomSampler, SamplerWithoutReplacement
    if recurrent and length is None and isinstance(sampler, known):
        raise ValueError(
            f"sampler must draw sequences for a recurrent network, got {kind}, which draws single steps. Use a "
            "SequenceSampler (data=sequence), a sampler with a batch_length, or a network without memory."
        )
    length = length or 1
    pads = isinstance(sampler, SequenceSampler) and sampler.episode_ends == "pad"
    required = sampler.burn_in + 1 if pads else length
    required += SamplerApi.of(sampler).num_earliest_frames_ignored
    num_envs = getattr(buffer.writer, "num_envs", 1)  # TorchRL's writers do not have num_envs
    capacity = buffer.storage.max_size // num_envs
    if required > capacity:
        raise ValueError(
            f"batch_length={length} of {kind} needs {required} steps of one environment, but the buffer stores at most "
            f"{capacity} steps of each. Choose shorter windows, or raise the buffer's max_size."
        )
    if steps is not None and required > steps:
        raise ValueError(
            f"batch_length={length} of {kind} needs {required} steps of one environment, but before the first update "
            f"each has made {steps}. Raise warmup_frames to {required * num_envs} or more, or choose shorter windows."
        )


def _join(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
