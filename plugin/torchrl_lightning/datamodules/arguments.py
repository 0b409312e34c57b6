"""What a user may hand over in several forms: environments and factories of collectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gymnasium.vector import VectorEnv


def environment_name(env: Any) -> str:
    """Names an environment given as an id, a factory or a ready vector environment.

    Example:
        >>> environment_name("CartPole-v1")
        'CartPole-v1'
    """
    if isinstance(env, str):
        return env
    if isinstance(env, VectorEnv):
        return env.spec.id if env.spec is not None else type(env).__name__
    return getattr(env, "__qualname__", None) or str(env)


def call_with_policy(make_collector: Callable[..., Any], policy: Any) -> Any:
    """Calls a collector factory with the policy, by name where it has such a parameter.

    Example:
        >>> call_with_policy(lambda policy: policy, "pi"), call_with_policy(lambda p: p, "pi")
        ('pi', 'pi')
    """
    if "policy" in inspect.signature(make_collector).parameters:
        return make_collector(policy=policy)
    return make_collector(policy)
