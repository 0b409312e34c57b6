"""Validate the setting ``write_back``: the buffer must store the named entries, and none may belong to a later step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs import EnvBase

from torchrl_lightning._core.keys import ACTION, FLAGS, IS_INIT, NEXT, RETURN, REWARD, STEP_TYPE
from torchrl_lightning._core.protocols import PolicyApi
from torchrl_lightning._core.tree import leaves_of, path_of
from torchrl_lightning.environments.policy_calls import recurrent_states
from torchrl_lightning.replay import ExperienceBuffer

STORED = frozenset({ACTION, *FLAGS, REWARD[-1], IS_INIT, RETURN, STEP_TYPE})
"""Entries of a step that a collector or an episodic buffer adds to the observations."""


def check_later_keys(keys: Sequence[NestedKey] | None, n_steps: int) -> None:
    """Validate that ``write_back`` does not name an entry of a later step; raise ValueError if it does."""
    later = [key for key in keys or () if path_of(key)[0] == NEXT]
    if n_steps > 1 and later:
        raise ValueError(
            f"write_back must name entries outside of 'next' with n_steps={n_steps}, got {later[0]!r}, which belongs "
            "to a later step in a batch. Leave it out, or set n_steps=1."
        )


def check_collected_keys(keys: Sequence[NestedKey] | None, data: Any, env: Any, policy: Any) -> None:
    """Validate before collection that our collector stores the entries to write back; raise ValueError if not.

    Other collectors, data sets and buffers may store more entries: see :func:`check_stored_keys`.

    Args:
        keys: The entries.
        data: The DataModule.
        env: The collection environment.
        policy: The collection policy.
    """
    outputs, buffer = PolicyApi.of(policy).out_keys, data.buffer
    is_known = data.make_collector is None and data.dataset is None and not isinstance(env, EnvBase)
    if not keys or outputs is None or not is_known or type(buffer).extend is not ExperienceBuffer.extend:
        return
    if buffer.transforms or len(buffer):
        return
    names = STORED | {path_of(key)[0] for key in (*data.specs.keys, *outputs, *recurrent_states(policy, 1))}
    for key in keys:
        path = path_of(key)
        if path[0] == NEXT and len(path) == 1:
            continue
        if path[path[0] == NEXT] not in names:
            raise _unknown_key(key, names)


def check_stored_keys(keys: Sequence[NestedKey] | None, buffer: Any, batch: TensorDictBase) -> None:
    """Validate that the first batch and the buffer contain the entries to write back; raise ValueError if not.

    Args:
        keys: The entries.
        buffer: The buffer. If a source stores the rows instead, the buffer is empty and is not checked.
        batch: The batch.
    """
    for key in keys or ():
        paths = [path_of(name) for name in batch.keys(True, True)]
        if len(buffer):
            paths = [path for path, _ in leaves_of(buffer.storage.tree) if path in paths]
        path = path_of(key)
        if all(stored_path[: len(path)] != path for stored_path in paths):
            raise _unknown_key(key, {".".join(stored_path) for stored_path in paths})


def _unknown_key(key: NestedKey, names: Collection[str]) -> ValueError:
    return ValueError(
        f"write_back must name entries that the buffer stores, got {key!r}, but it stores {', '.join(sorted(names))}. "
        "Leave it out, or name one of these."
    )
