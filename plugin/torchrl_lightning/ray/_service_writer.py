"""Write into the shards of a replay service, and resend rollouts that a dead shard lost."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchrl_lightning._core.errors import UserError
from torchrl_lightning.ray._wire import Arrays, Receipt
from torchrl_lightning.ray.cluster import ServiceFault, in_one_line

logger = logging.getLogger(__name__)

PATIENCE = 300.0  # seconds until a dead shard must be back
_PAUSE = 0.2


def answer(ask: Callable[..., Any], *args: Any, sent: Any = None) -> Any:
    """Return a shard's answer to the request ``ask(*args)``; repeat it after the shard died, until it is back.

    Args:
        ask: Sends the request.
        args: Its arguments.
        sent: A request that was sent already.

    Raises:
        Fault: The shard rejects the request.
        ServiceFault: The shard was ended, or is not back in time.
    """
    import ray

    began: float | None = None
    while True:
        try:
            request, sent = ask(*args) if sent is None else sent, None
            return ray.get(request)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise ServiceFault(f"The replay service refuses this: {in_one_line(error.cause)}") from error
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            now = time.monotonic()
            if began is None:
                began = now
                logger.warning("the replay service died; it goes on from its snapshot (%.200s).", in_one_line(error))
            if now - began > PATIENCE or _is_ended(error):
                raise ServiceFault(
                    f"The replay service has ended and does not come back: {in_one_line(error)}"
                ) from error
            time.sleep(_PAUSE)


def _is_ended(error: Exception) -> bool:
    """Return whether an actor was ended permanently by ``ray.kill``."""
    return "ray.kill" in str(error)


class ServiceWriter:
    """Write rollouts into a replay service, the rows of each environment into its shard.

    It can be pickled before its first write.

    Args:
        shards: The handles of the actors.
        num_envs: The number of environments in all shards together.
        name: The name of the rollouts' sender.
        unacknowledged: The maximum number of kept rollouts without an acknowledgement.
    """

    def __init__(self, shards: Sequence[Any], num_envs: int, name: str, unacknowledged: int) -> None:
        self._writers = [ShardWriter(shard, name, unacknowledged) for shard in shards]
        self._share = num_envs // len(shards)

    def write(self, rows: Arrays, env_ids: Sequence[int], cut: Sequence[int] = (), compares: bool = False) -> None:
        """Send a rollout ``[T, N, *F]`` of the environments ``[N]``.

        Args:
            rows: The rollout.
            env_ids: Its environments.
            cut: Environments that begin a new trajectory with these rows.
            compares: Compare the rows with stored successors; not necessary for rows of our collectors.
        """
        if len(self._writers) == 1:
            self._writers[0].write(rows, list(env_ids), list(cut), compares)
            return
        columns: dict[int, list[int]] = {}
        for column, env in enumerate(env_ids):
            columns.setdefault(env // self._share, []).append(column)
        for shard, own in columns.items():
            whole = len(own) == len(env_ids)
            part = rows if whole else {key: np.ascontiguousarray(value[:, own]) for key, value in rows.items()}
            there = [env_ids[column] for column in own]
            self._writers[shard].write(part, there, [env for env in there if env in cut], compares)

    def settle(self) -> None:
        """Wait until all sent rollouts are written."""
        for writer in self._writers:
            writer.settle()


class ShardWriter:
    """Write rollouts into a shard in order, each once; the next is collected while one is written.

    At most ``unacknowledged`` rollouts are kept until a snapshot contains them; at the limit the writer requests a
    snapshot. After the shard died, the kept rollouts are sent again.

    Args:
        shard: The handle of the actor.
        name: The name of the rollouts' sender.
        unacknowledged: The maximum number of kept rollouts.
    """

    def __init__(self, shard: Any, name: str, unacknowledged: int) -> None:
        self._shard, self._name, self._bound = shard, name, unacknowledged
        self._session = secrets.token_hex(8)
        self._kept: deque[tuple[int, Arrays, list[int], list[int], bool]] = deque()
        self._number = 0
        self._sent: Any = None  # the pending request
        self.written = 0
        """The number of rollouts that the shard has confirmed as written."""

    def write(self, rows: Arrays, env_ids: list[int], cut: list[int], compares: bool) -> None:
        """Wait until the previous rollout is written, and send the next, ``[T, N, *F]``, without waiting."""
        self._finish()
        while len(self._kept) >= self._bound:  # repeats if the shard dies meanwhile and loses rollouts
            self._note(answer(self._shard.flush.remote, self._name, self._session))
            self._send_again()
        self._kept.append((self._number, rows, env_ids, cut, compares))
        self._number += 1
        self._sent = self._send(-1)

    def settle(self) -> None:
        """Wait until all sent rollouts are written, and resend lost ones."""
        self._finish()
        if self._kept:
            self._note(answer(self._shard.receipt.remote, self._name, self._session))
            self._send_again()

    def _finish(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        self._note(answer(self._send, -1, sent=sent))
        self._send_again()

    def _send_again(self) -> None:
        while self.written < self._number:
            self._note(answer(self._send, self.written - self._kept[0][0]))

    def _send(self, place: int) -> Any:
        return self._shard.insert.remote(self._name, self._session, *self._kept[place])

    def _note(self, receipt: Receipt) -> None:
        self.written, acknowledged = receipt
        while self._kept and self._kept[0][0] < acknowledged:
            self._kept.popleft()
