"""Who writes into a shard of a replay service, and sends again what died with it."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchrl_lightning.distributed._wire import Arrays, Receipt
from torchrl_lightning.distributed.cluster import ServiceFault, in_one_line
from torchrl_lightning.fitting import Fault

logger = logging.getLogger(__name__)

PATIENCE = 300.0  # seconds in which a shard that died may be back
_PAUSE = 0.2


def answer(ask: Callable[..., Any], *args: Any, sent: Any = None) -> Any:
    """Return what a shard answers to ``ask(*args)``, a request; ask again where it dies, until it is back.

    Args:
        ask: Sends the request.
        args: Its arguments.
        sent: The request, where it is under way already.

    Raises:
        Fault: It refuses the request.
        ServiceFault: It does not come back, or was ended.
    """
    import ray

    began: float | None = None
    while True:
        try:
            request, sent = ask(*args) if sent is None else sent, None
            return ray.get(request)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Fault):
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
    """Return whether an actor was ended for good, by ``ray.kill``, rather than died."""
    return "ray.kill" in str(error)


class ServiceWriter:
    """Write rollouts into a replay service, the rows of each environment into its shard.

    It can be pickled before it has written.

    Args:
        shards: The handles of the actors.
        num_envs: Of how many environments they have rings.
        name: Whose rollouts these are.
        unacknowledged: How many rollouts without an acknowledgement it may keep.
    """

    def __init__(self, shards: Sequence[Any], num_envs: int, name: str, unacknowledged: int) -> None:
        self._writers = [ShardWriter(shard, name, unacknowledged) for shard in shards]
        self._share = num_envs // len(shards)

    def write(self, rows: Arrays, env_ids: Sequence[int], cut: Sequence[int] = (), compares: bool = False) -> None:
        """Send a rollout ``[T, N, *F]`` of the environments ``[N]``.

        Args:
            rows: The rollout.
            env_ids: Its environments.
            cut: Environments whose rows do not continue the trajectory that is stored.
            compares: Whether the rows are compared with stored successors; rows of our collectors are not.
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
        """Wait until all that was sent is written."""
        for writer in self._writers:
            writer.settle()


class ShardWriter:
    """Write rollouts into a shard in their order, each once; the next is collected while one is written.

    Rollouts that no snapshot holds are kept, at most ``unacknowledged`` of them: then the shard is asked for a
    snapshot. Where it dies they are sent again.

    Args:
        shard: The handle of the actor.
        name: Whose rollouts these are.
        unacknowledged: How many it may keep.
    """

    def __init__(self, shard: Any, name: str, unacknowledged: int) -> None:
        self._shard, self._name, self._bound = shard, name, unacknowledged
        self._session = secrets.token_hex(8)
        self._kept: deque[tuple[int, Arrays, list[int], list[int], bool]] = deque()
        self._number = 0
        self._sent: Any = None  # the request under way
        self.written = 0
        """Rollouts that the shard has said to have written."""

    def write(self, rows: Arrays, env_ids: list[int], cut: list[int], compares: bool) -> None:
        """Send a rollout ``[T, N, *F]``; wait until the one before is written, which it may not be yet."""
        self._finish()
        while len(self._kept) >= self._bound:  # more than once where it dies meanwhile, and holds less
            self._note(answer(self._shard.flush.remote, self._name, self._session))
            self._send_again()
        self._kept.append((self._number, rows, env_ids, cut, compares))
        self._number += 1
        self._sent = self._send(-1)

    def settle(self) -> None:
        """Wait until all that was sent is written, and has not been lost since."""
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
