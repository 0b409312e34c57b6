"""Wait for answers from actors of a Ray cluster, and log a warning if an answer takes long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchrl_lightning._core.memory import format_bytes

logger = logging.getLogger(__name__)

WARNING_INTERVAL = 60.0  # seconds without an answer until a warning
Demand = Mapping[str, float]


class WaitWarning:
    """Log a warning after each ``WARNING_INTERVAL`` seconds of a wait.

    Args:
        ray: The module, or a replacement in tests.
        awaited: The awaited answer.
        demand: The resources that the actor needs to start, or None for an actor that has started.
    """

    def __init__(self, ray: Any, awaited: str, demand: Demand | None = None) -> None:
        self._ray, self._awaited, self._demand = ray, awaited, demand
        self._begun_at = self._warned_at = time.monotonic()

    @property
    def remaining(self) -> float:
        """The seconds until the next warning."""
        return max(self._warned_at + WARNING_INTERVAL - time.monotonic(), 0.0)

    def warn_if_due(self, demand: Demand | None = None) -> None:
        """Log a warning if ``WARNING_INTERVAL`` has passed since the last warning.

        Args:
            demand: The resources that the actor needs to start again, if it has died.
        """
        now = time.monotonic()
        if now < self._warned_at + WARNING_INTERVAL:
            return
        self._warned_at = now
        demand = self._demand if demand is None else demand
        lack = "" if demand is None else f" {describe_lack(self._ray, 'The actor', demand)}"
        logger.warning("waiting for %s for %.0f s.%s", self._awaited, now - self._begun_at, lack)


def wait_for(ray: Any, ref: Any, warning: WaitWarning, deadline: float = float("inf")) -> Any:
    """Return the answer of a request, or raise the error of the request.

    Raises:
        GetTimeoutError: The answer did not arrive until ``deadline``, a time of ``time.monotonic``.
    """
    while True:
        try:
            return ray.get(ref, timeout=max(min(warning.remaining, deadline - time.monotonic()), 0.0))
        except ray.exceptions.RayTaskError:
            raise  # The class of this error can also be a subclass of GetTimeoutError.
        except ray.exceptions.GetTimeoutError:
            warning.warn_if_due()
            if time.monotonic() >= deadline:
                raise


def ready_within(ray: Any, refs: list[Any], seconds: float) -> list[Any]:
    """Return the requests that are answered within a number of seconds."""
    ready: list[Any] = ray.wait(refs, num_returns=len(refs), timeout=seconds)[0]
    return ready


@contextmanager
def warnings_during(awaited: str) -> Iterator[None]:
    """Log a warning after each ``WARNING_INTERVAL`` seconds of a block that waits in Ray's own code."""
    begun_at, ended = time.monotonic(), threading.Event()

    def warn() -> None:
        while not ended.wait(WARNING_INTERVAL):
            logger.warning("waiting for %s for %.0f s.", awaited, time.monotonic() - begun_at)

    thread = threading.Thread(target=warn, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class AnswerTimes:
    """Log a warning about each worker that has pending requests and has not answered for ``WARNING_INTERVAL`` seconds.

    Args:
        ray: The module.
        demand: The resources that each actor needs to start.
    """

    def __init__(self, ray: Any, demand: Demand) -> None:
        self._ray, self._demand = ray, demand
        self._started: set[int] = set()
        self._silent_since: dict[int, float] = {}
        self._due: dict[int, float] = {}  # time of the next warning about each worker
        self._next_due = float("inf")

    def has_started(self, worker: int) -> bool:
        """Return True if the actor of a worker has answered."""
        return worker in self._started

    def starts(self, worker: int) -> None:
        """Note that a new actor of a worker was requested."""
        self._started.discard(worker)
        self._note(worker)

    def answered(self, worker: int) -> None:
        """Note that a worker has answered."""
        self._started.add(worker)
        self._note(worker)

    def _note(self, worker: int) -> None:
        now = self._silent_since[worker] = time.monotonic()
        self._due[worker] = now + WARNING_INTERVAL
        self._next_due = min(self._next_due, self._due[worker])

    def first_ready(self, pending: Mapping[Any, int]) -> Any:
        """Return the first request with an answer, of requests with their workers."""
        while True:
            timeout = max(self._next_due - time.monotonic(), 0.0)
            ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=timeout)
            if time.monotonic() >= self._next_due:
                self._warn(pending)
            if ready:
                return ready[0]

    def _warn(self, pending: Mapping[Any, int]) -> None:
        now, ready = time.monotonic(), ready_within(self._ray, list(pending), 0.0)
        answered = {pending[ref] for ref in ready}  # these workers wait for the learner
        self._due.update(dict.fromkeys(answered, now + WARNING_INTERVAL))
        workers = sorted(worker for worker in set(pending.values()) if now >= self._due[worker])
        self._due.update(dict.fromkeys(workers, now + WARNING_INTERVAL))
        self._next_due = min(self._due.values())
        if not workers:
            return
        seconds = now - min(self._silent_since[worker] for worker in workers)
        waits = [worker for worker in workers if worker not in self._started]
        lack = f" {describe_lack(self._ray, f'Each of the collectors {waits}', self._demand)}" if waits else ""
        logger.warning("waiting for rollouts of the collectors %s for %.0f s.%s", workers, seconds, lack)


def demand_of(remote_configs: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that the options of ``ray.remote`` reserve for an actor."""
    demand = {
        "CPU": remote_configs.get("num_cpus", 1),
        "GPU": remote_configs.get("num_gpus", 0),
        "memory": remote_configs.get("memory", 0),
        **(remote_configs.get("resources") or {}),
    }
    return {name: float(amount) for name, amount in demand.items() if amount}


def describe_lack(ray: Any, subject: str, demand: Demand) -> str:
    """Return a sentence with the resources that an actor needs to start, and the free resources of the cluster."""
    if not demand:
        return f"{subject} has not started; it reserves no resources."
    needed = " and ".join(_amount(name, amount) for name, amount in demand.items())
    try:
        total, free = ray.cluster_resources(), ray.available_resources()
    except Exception:  # a warning must not end a run whose cluster does not answer for some time
        return f"{subject} has not started and needs {needed}; the cluster does not return its free resources."
    left = " and ".join(
        f"{_amount(name, free.get(name, 0.0))} of {_amount(name, total.get(name, 0.0))}" for name in demand
    )
    return f"{subject} has not started and needs {needed}; free in the cluster: {left}."


def _amount(name: str, amount: float) -> str:
    return f"{name} {format_bytes(int(amount))}" if name.endswith("memory") else f"{amount:g} {name}"
