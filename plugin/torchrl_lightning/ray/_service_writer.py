"""Write into the shards of a replay service, and resend rollouts that were lost when a shard died."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchrl_lightning._core.errors import UserError
from torchrl_lightning.ray._serialization import Arrays, Receipt
from torchrl_lightning.ray.cluster import ServiceFault, one_line

logger = logging.getLogger(__name__)

RECONNECT_TIMEOUT = 300.0  # seconds until a dead shard must be available again
_RETRY_INTERVAL = 0.2


def call_shard(send: Callable[..., Any], *args: Any, pending: Any = None) -> Any:
    """Return a shard's answer to the request ``send(*args)``. If the shard died, repeat the request until it answers.

    Args:
        send: The function that sends the request.
        args: The arguments of the request.
        pending: A request that was already sent.

    Raises:
        UserError: The shard rejects the request.
        ServiceFault: The shard was ended permanently, or did not restart in time.
    """
    import ray

    first_failure: float | None = None
    while True:
        try:
            request, pending = send(*args) if pending is None else pending, None
            return ray.get(request)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise ServiceFault(f"The replay service rejected a request: {one_line(error.cause)}") from error
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            now = time.monotonic()
            if first_failure is None:
                first_failure = now
                logger.warning("the replay service died; it continues from its snapshot (%.200s).", one_line(error))
            if now - first_failure > RECONNECT_TIMEOUT or _was_killed(error):
                raise ServiceFault(f"The replay service has ended and did not restart: {one_line(error)}") from error
            time.sleep(_RETRY_INTERVAL)


def _was_killed(error: Exception) -> bool:
    """Return True if ``ray.kill`` has ended an actor permanently."""
    return "ray.kill" in str(error)


class ServiceWriter:
    """Write rollouts into a replay service; send the rows of each environment to the environment's shard.

    A writer can be pickled before its first write.

    Args:
        shards: The handles of the actors.
        num_envs: The number of environments in all shards together.
        name: The name of this writer.
        unacknowledged: The maximum number of rollouts that wait for an acknowledgement.
    """

    def __init__(self, shards: Sequence[Any], num_envs: int, name: str, unacknowledged: int) -> None:
        self._writers = [ShardWriter(shard, name, unacknowledged) for shard in shards]
        self._envs_per_shard = num_envs // len(shards)

    def write(
        self, rows: Arrays, env_ids: Sequence[int], cut_envs: Sequence[int] = (), check_successors: bool = False
    ) -> None:
        """Send a rollout ``[T, N, *F]`` of the environments ``[N]``.

        Args:
            rows: The rollout.
            env_ids: The environments of the rollout.
            cut_envs: Environments in a new trajectory that begins with these rows.
            check_successors: Compare the rows with stored successors. Rows from our collectors do not require the
                comparison.
        """
        if len(self._writers) == 1:
            self._writers[0].write(rows, list(env_ids), list(cut_envs), check_successors)
            return
        columns: dict[int, list[int]] = {}
        for column, env in enumerate(env_ids):
            columns.setdefault(env // self._envs_per_shard, []).append(column)
        for shard, shard_columns in columns.items():
            is_whole = len(shard_columns) == len(env_ids)
            shard_rows = (
                rows
                if is_whole
                else {key: np.ascontiguousarray(value[:, shard_columns]) for key, value in rows.items()}
            )
            shard_envs = [env_ids[column] for column in shard_columns]
            shard_cut_envs = [env for env in shard_envs if env in cut_envs]
            self._writers[shard].write(shard_rows, shard_envs, shard_cut_envs, check_successors)

    def wait_until_written(self) -> None:
        """Wait until all sent rollouts are written."""
        for writer in self._writers:
            writer.wait_until_written()


class ShardWriter:
    """Write each rollout once and in order into a shard, while the next rollout is collected.

    The writer keeps rollouts until a snapshot contains them. When their number reaches ``unacknowledged``, the writer
    requests a snapshot. If the shard died, the writer sends the lost rollouts again.

    Args:
        shard: The handle of the actor.
        name: The name of this writer.
        unacknowledged: The maximum number of kept rollouts.
    """

    def __init__(self, shard: Any, name: str, unacknowledged: int) -> None:
        self._shard, self._name, self._max_unacknowledged = shard, name, unacknowledged
        self._session = secrets.token_hex(8)
        self._unacknowledged: deque[tuple[int, Arrays, list[int], list[int], bool]] = deque()
        self._num_sent = 0
        self._pending: Any = None  # the pending request
        self.written = 0
        """The number of rollouts that the shard has confirmed as written."""

    def write(self, rows: Arrays, env_ids: list[int], cut_envs: list[int], check_successors: bool) -> None:
        """Wait until the previous rollout is written, and send the next rollout ``[T, N, *F]`` without waiting."""
        self._wait_for_pending()
        while len(self._unacknowledged) >= self._max_unacknowledged:  # several requests if the shard has lost rollouts
            self._read_receipt(call_shard(self._shard.flush.remote, self._name, self._session))
            self._resend_lost()
        self._unacknowledged.append((self._num_sent, rows, env_ids, cut_envs, check_successors))
        self._num_sent += 1
        self._pending = self._send(-1)

    def wait_until_written(self) -> None:
        """Wait until all sent rollouts are written, and resend lost rollouts."""
        self._wait_for_pending()
        if self._unacknowledged:
            self._read_receipt(call_shard(self._shard.receipt.remote, self._name, self._session))
            self._resend_lost()

    def _wait_for_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._read_receipt(call_shard(self._send, -1, pending=pending))
        self._resend_lost()

    def _resend_lost(self) -> None:
        while self.written < self._num_sent:
            self._read_receipt(call_shard(self._send, self.written - self._unacknowledged[0][0]))

    def _send(self, index: int) -> Any:
        return self._shard.insert.remote(self._name, self._session, *self._unacknowledged[index])

    def _read_receipt(self, receipt: Receipt) -> None:
        self.written, acknowledged = receipt
        while self._unacknowledged and self._unacknowledged[0][0] < acknowledged:
            self._unacknowledged.popleft()
