"""Write into the shards of a replay service, and resend rollouts that were lost when a shard died.

Without a folder, a shard that died begins empty. Its writers then log the number of lost rows and continue.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from torchrl_lightning._core.errors import UserError
from torchrl_lightning.ray._serialization import Arrays, Receipt
from torchrl_lightning.ray._waits import Demand, WaitWarning, ready_within, wait_for
from torchrl_lightning.ray.cluster import (
    FirstCallMissing,
    ServiceFault,
    death_errors,
    has_failed_to_start,
    last_line,
    one_line,
)

logger = logging.getLogger(__name__)

RECONNECT_TIMEOUT = 300.0  # seconds until a dead shard must be available again
_RETRY_INTERVAL = 0.2
_WAIT_CHECK_DELAY = 1.0  # seconds until a call checks whether it waits for its own thread
_PROCESS = secrets.token_hex(8)


class RejectedRequest(ServiceFault):
    """A shard has rejected the content of a request."""


class Shard(NamedTuple):
    """A shard as its callers see it: the actor's handle, the name in messages, and the resources that it reserves."""

    actor: Any
    name: str
    demand: Demand | None  # None if another run has started the actor


def current_caller() -> str:
    """Return a name of this thread that no other thread in the cluster has."""
    return f"{_PROCESS}/{os.getpid()}/{threading.get_ident()}"


def merged_knowledge(known: bool | None, new: bool | None) -> bool | None:
    """Return whether other threads use a shard, from earlier knowledge and a new answer; None is unknown.

    Examples:
        >>> merged_knowledge(None, False), merged_knowledge(False, None), merged_knowledge(True, False)
        (False, False, True)
    """
    return known if new is None else bool(known) or new


def call_shard(
    shard: Shard,
    awaited: str,
    send: Callable[..., Any],
    *args: Any,
    pending: Any = None,
    starts: bool = False,
    check_wait: Callable[[Any], None] | None = None,
) -> Any:
    """Return a shard's answer to the request ``send(*args)``. If the shard died, repeat the request until it answers.

    Args:
        shard: The shard.
        awaited: The answer, for the warning about a long wait.
        send: The function that sends the request.
        args: The arguments of the request.
        pending: A request that was already sent.
        starts: The shard may not have a place in the cluster yet.
        check_wait: A function that is called with the request if the answer takes long. It raises an error if the
            request waits forever.

    Raises:
        RejectedRequest: The shard rejects the content of the request.
        UserError: The shard cannot start, or the request waits forever.
        ServiceFault: The shard was ended permanently, or did not restart in time.
    """
    import ray

    first_failure: float | None = None
    warning = WaitWarning(ray, f"{awaited} of {shard.name}", shard.demand if starts else None)
    while True:
        try:
            request, pending = send(*args) if pending is None else pending, None
            if check_wait is not None and not ready_within(ray, [request], _WAIT_CHECK_DELAY):
                try:
                    check_wait(request)
                except FirstCallMissing as reason:
                    logger.warning("%s waits: %s", shard.name, reason)
            return wait_for(ray, request, warning)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise RejectedRequest(f"The replay service rejected a request: {one_line(error.cause)}") from error
        except death_errors(ray) as error:
            if has_failed_to_start(error):
                raise ServiceFault(
                    f"{shard.name} cannot start: {last_line(error)}. Install the same versions on all machines."
                ) from error
            now = time.monotonic()
            if first_failure is None:
                first_failure = now
                logger.warning("%s died; it starts again (%.200s).", shard.name, one_line(error))
            if now - first_failure > RECONNECT_TIMEOUT or _was_killed(error):
                raise ServiceFault(f"The replay service has ended and did not restart: {one_line(error)}") from error
            warning.warn_if_due(shard.demand)
            time.sleep(_RETRY_INTERVAL)


def _was_killed(error: Exception) -> bool:
    """Return True if ``ray.kill`` has ended an actor permanently."""
    return "ray.kill" in str(error)


class ServiceWriter:
    """Write rollouts into a replay service; send the rows of each environment to the environment's shard.

    A writer can be pickled before its first write.

    Args:
        shards: The shards of the service.
        num_envs: The number of environments in all shards together.
        name: The name of this writer.
        unacknowledged: The maximum number of rollouts that wait for an acknowledgement.
        ring_length: The maximum number of stored steps of each environment.
    """

    def __init__(
        self, shards: Sequence[Shard], num_envs: int, name: str, unacknowledged: int, ring_length: int
    ) -> None:
        self._writers = [ShardWriter(shard, name, unacknowledged, num_envs, ring_length) for shard in shards]
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

    def wait_until_written(self, shard: int | None = None) -> bool:
        """Wait until all rollouts that were sent to a shard, or to all shards for None, are written.

        Returns:
            True if rollouts were sent again, because a shard had died.
        """
        writers = self._writers if shard is None else [self._writers[shard]]
        return sum(writer.wait_until_written() for writer in writers) > 0


class ShardWriter:
    """Write each rollout once and in order into a shard, while the next rollout is collected.

    The writer keeps rollouts until a snapshot contains them. When their number reaches ``unacknowledged``, the writer
    requests a snapshot. If the shard died, the writer sends the lost rollouts again. If the shard has lost rollouts
    that the writer does not keep, the writer logs the number of their rows and continues with its kept rollouts.

    Args:
        shard: The shard.
        name: The name of this writer.
        unacknowledged: The maximum number of kept rollouts.
        num_envs: The number of environments in all shards together.
        ring_length: The maximum number of stored steps of each environment.
    """

    def __init__(self, shard: Shard, name: str, unacknowledged: int, num_envs: int, ring_length: int) -> None:
        self._shard, self._name, self._max_unacknowledged = shard, name, unacknowledged
        self._session = secrets.token_hex(8)
        self._unacknowledged: deque[tuple[int, Arrays, list[int], list[int], bool]] = deque()
        self._num_sent = 0
        self._acknowledged_steps = np.zeros(num_envs, np.int64)  # of each environment in this session
        self._ring_length = ring_length
        self._cut_envs: set[int] = set()  # the last rows of these environments are lost
        self._has_other_readers: bool | None = None  # whether other threads draw; None if it is unknown
        self._pending: Any = None  # the pending request
        self.written = 0
        """The number of rollouts that the shard has confirmed as written."""

    def write(self, rows: Arrays, env_ids: list[int], cut_envs: list[int], check_successors: bool) -> None:
        """Wait until the previous rollout is written, and send the next rollout ``[T, N, *F]`` without waiting."""
        self._wait_for_pending()
        while len(self._unacknowledged) >= self._max_unacknowledged:  # several requests if the shard has lost rollouts
            self._read_receipt(self._call("the snapshot", self._shard.actor.flush.remote, self._name, self._session))
            self._resend_lost()
        self._append(rows, env_ids, cut_envs, check_successors)
        self._pending = self._send(self._num_sent - 1)

    def _append(self, rows: Arrays, env_ids: list[int], cut_envs: list[int], check_successors: bool) -> None:
        if self._cut_envs:
            cut_envs = [env for env in env_ids if env in self._cut_envs or env in cut_envs]
            self._cut_envs.difference_update(env_ids)
        self._unacknowledged.append((self._num_sent, rows, env_ids, cut_envs, check_successors))
        self._num_sent += 1

    def wait_until_written(self) -> bool:
        """Wait until all sent rollouts are written; return True if lost rollouts were sent again."""
        has_resent = self._wait_for_pending()
        if self._num_sent:
            arguments = self._name, self._session, current_caller()
            self._read_receipt(self._call("the receipt", self._shard.actor.receipt.remote, *arguments))
            has_resent |= self._resend_lost()
        return has_resent

    def _wait_for_pending(self) -> bool:
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        self._confirm(self._num_sent - 1, pending)
        return self._resend_lost()

    def _resend_lost(self) -> bool:
        has_lost = self.written < self._num_sent
        while self.written < self._num_sent:
            self._confirm(self.written)
        return has_lost

    def _confirm(self, number: int, pending: Any = None) -> None:
        """Wait until a rollout is written. If the shard rejects the rollout, drop it and cut its environments."""
        send, check_wait = partial(self._send, number), partial(self._check_wait, number)
        try:
            receipt = self._call("the receipt", send, pending=pending, check_wait=check_wait)
        except RejectedRequest:
            kept = list(self._unacknowledged)
            self._unacknowledged, self._num_sent = deque(), kept[0][0]
            for rollout_number, rows, env_ids, cut_envs, check_successors in kept:
                if rollout_number == number:
                    self._cut_envs.update(env_ids)
                else:
                    self._append(rows, env_ids, cut_envs, check_successors)
            raise
        self._read_receipt(receipt)

    def _call(self, awaited: str, send: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        return call_shard(self._shard, f"{awaited} for rollouts of {self._name}", send, *args, **settings)

    def _send(self, number: int) -> Any:
        rollout = self._unacknowledged[number - self._unacknowledged[0][0]]
        return self._shard.actor.insert.remote(self._name, self._session, *rollout, current_caller())

    def _check_wait(self, number: int, request: Any) -> None:
        """Raise a ServiceFault if a rollout waits for draws of this thread."""
        arguments = (self._session, number), current_caller(), self._has_other_readers
        others = self._call("the check of a wait", self._shard.actor.check_wait.remote, *arguments)
        self._has_other_readers = merged_knowledge(self._has_other_readers, others)

    def _read_receipt(self, receipt: Receipt) -> None:
        self.written, acknowledged, has_other_readers, start = receipt
        self._has_other_readers = merged_knowledge(self._has_other_readers, has_other_readers)
        while self._unacknowledged and self._unacknowledged[0][0] < acknowledged:
            _, rows, env_ids, *_ = self._unacknowledged.popleft()
            steps = self._acknowledged_steps.copy()  # Ray makes the arrays of a sent object read-only
            steps[env_ids] += len(next(iter(rows.values())))
            self._acknowledged_steps = steps
        if self.written < self._num_sent - len(self._unacknowledged):
            self._begin_session(start)

    def _begin_session(self, start: str) -> None:
        """Log the number of lost rows, and write the kept rollouts as the first rollouts of a new session."""
        num_rows = int(np.minimum(self._acknowledged_steps, self._ring_length).sum())
        logger.warning(
            "%s died and begins %s: %s%d rows of writer %r are lost. It continues with new rows. Set folder, so that "
            "snapshots keep its rows.",
            self._shard.name,
            start,
            "up to " if self.written else "",
            num_rows,
            self._name,
        )
        self._session, self.written = secrets.token_hex(8), 0
        self._acknowledged_steps = np.zeros_like(self._acknowledged_steps)
        self._cut_envs = set(range(len(self._acknowledged_steps)))
        kept, self._unacknowledged, self._num_sent = list(self._unacknowledged), deque(), 0
        for _, rows, env_ids, cut_envs, check_successors in kept:
            self._append(rows, env_ids, cut_envs, check_successors)
