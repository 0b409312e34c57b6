"""The Ray actor of a replay service, which stores one shard, limits the rates, and writes snapshots."""

from __future__ import annotations

import torchrl_lightning.ray._actor_imports  # noqa: F401

# isort: split
import asyncio
import pickle
import re
import shutil
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.files import read_state_folder, write_state_folder
from torchrl_lightning.environments.seeds import spawn_seed
from torchrl_lightning.ray._serialization import Arrays, BatchUpdate, Receipt, SampledBatches, pack_batch, unpack_batch
from torchrl_lightning.ray.cluster import FirstCallMissing, ServiceFault, installed_versions, one_line
from torchrl_lightning.ray.rate_limiter import RateLimiter
from torchrl_lightning.replay import ExperienceBuffer

T = TypeVar("T")
Request = tuple[str, int]  # the sender and the number of a request
VERSION = 1
_MAX_SNAPSHOTS = 2  # stored snapshots of each kind
SNAPSHOT_NAME = re.compile(r"(snapshot|checkpoint)_(\d{8})")


class ServiceActor:
    """One shard of a :class:`ReplayService`.

    Ray restarts a dead actor with the same arguments. The new actor continues from the newest snapshot. All calls run
    in one thread, so that each call reads complete rows. Waiting calls do not block the thread.

    Args:
        module_paths: The import paths of the run.
        payload: The empty buffer and a rate limiter, pickled and compressed.
        shard: The number of the shard.
        folder: The folder of the shard's snapshots. With None, written rollouts are acknowledged immediately.
        resumed: The snapshot to load at the start.
    """

    def __init__(
        self, module_paths: list[str], payload: bytes, shard: int, folder: str | None, resumed: str | None
    ) -> None:
        sys.path.extend(folder for folder in module_paths if folder not in sys.path)
        torch.set_num_threads(1)
        self._buffer: ExperienceBuffer
        self._limiter: RateLimiter
        self._start_time = time.time_ns() // 1000
        self._sessions: dict[str, tuple[str, int]] = {}  # session and number of written rollouts of each writer
        self._acknowledged: dict[str, tuple[str, int]] = {}
        self._condition = asyncio.Condition()
        self._folder = None if folder is None else Path(folder)
        self._next_snapshot = 0  # number of the next snapshot
        self._fault: UserError | None = None
        self._start = "empty"
        self._changed_ratio: str | None = None  # a sentence about a ratio that differs from the loaded snapshot
        self._callers: dict[str, str] = {}  # the thread of each writer
        self._readers: set[str] = set()  # the threads that draw
        self._waiting: dict[Request, tuple[bool, int]] = {}  # True for draws, and the number of rows
        self._missing_steps = ""  # the reason why the sampler finds no batch, while a restarted actor is refilled
        self._is_restarted = self._is_refilling = self._lacks_draws = is_restarted = _is_restarted()
        self._is_catching_up = False  # inserts do not wait until the next draw
        try:
            self._buffer, self._limiter = pickle.loads(zlib.decompress(payload))
            if shard:
                self._buffer.generator.manual_seed(spawn_seed(self._buffer.generator.initial_seed(), "shard", shard))
            self._restore_first(resumed, is_restarted)
        except UserError as fault:
            self._fault = fault
        except Exception as error:  # after a raised error, Ray would restart the actor repeatedly
            self._fault = ServiceFault(f"The replay service cannot start: {type(error).__name__}: {error}")

    def describe(self) -> dict[str, Any]:
        """Return the versions, buffer and limits that a client compares; raise an error if the start failed."""
        self._check_started()
        properties = buffer_properties(self._buffer)
        return {
            "versions": installed_versions(),
            "buffer": properties,
            "limits": self._limiter.settings,
            "changed_ratio": self._changed_ratio,
        }

    def _check_started(self) -> None:
        if self._fault is not None:
            raise self._fault

    # -- writing -----------------------------------------------------------------------------------------------------
    async def insert(
        self,
        writer: str,
        session: str,
        number: int,
        arrays: Arrays,
        env_ids: list[int],
        cut_envs: Sequence[int] = (),
        check_successors: bool = False,
        caller: str = "",
    ) -> Receipt:
        """Write a rollout ``[T, N, *F]`` as soon as the rate limiter admits the rollout.

        In the environments ``cut_envs``, a new trajectory begins with the rollout. ``check_successors`` enables the
        comparison of the rollout's rows with stored successors. ``caller`` identifies the writer's thread.

        A rollout is skipped if it is already written, or if earlier rollouts were lost when this actor died. The writer
        learns from the receipt which rollouts it must send again.
        """
        self._check_started()
        self._callers[writer] = caller
        if number != self._num_written(writer, session):
            return self.receipt(writer, session)
        shape = next(iter(arrays.values())).shape[:2]
        rows = shape[0] * shape[1]
        async with self._condition:
            await self._wait_for(
                (session, number),
                (False, rows),
                lambda: (
                    number != self._num_written(writer, session)
                    or self._is_catching_up
                    or self._limiter.admits_insert(rows)
                ),
            )
            if number == self._num_written(writer, session):
                rollout = unpack_batch(shape, ["time", None], arrays)
                self._buffer.writer.check_successors = check_successors
                if cut_envs:
                    self._buffer.writer.cut(torch.tensor(cut_envs))
                self._buffer.extend(rollout, torch.tensor(env_ids))
                self._limiter.inserted += rollout.numel()
                self._sessions[writer] = session, number + 1
                self._missing_steps = ""
                self._condition.notify_all()
        return self.receipt(writer, session)

    async def _wait_for(self, request: Request, waiting: tuple[bool, int], admits: Callable[[], T]) -> T:
        """Wait for a true result of ``admits``. If the limiter raises an error, wake all waiting requests."""
        try:
            self._waiting[request] = waiting
            return await self._condition.wait_for(admits)
        except UserError:
            self._condition.notify_all()
            raise
        finally:
            self._waiting.pop(request, None)

    async def check_wait(self, request: Request, caller: str, has_others: bool | None) -> bool | None:
        """Raise a ServiceFault if a request of a thread waits for other requests that only the same thread sends.

        Raise a FirstCallMissing if no thread has sent such requests yet.

        Args:
            request: The session and number of a rollout, or the sender and number of a draw.
            caller: The thread that waits for the answer.
            has_others: Whether other threads have written or drawn before; None if the sender does not know it.

        Returns:
            Whether other threads write or draw; None if the request does not wait, or if this actor was restarted and
            other threads have not called it yet.
        """
        async with self._condition:
            if request not in self._waiting:
                return None
            is_draw, rows = self._waiting[request]
            others = self._has_others(set(self._callers.values()) if is_draw else self._readers, caller)
            if has_others or others:
                return others
            is_unknown = has_others is None and others is None
            if is_draw:
                if not self._callers and others is False and not self._limiter.admits_draw(rows):
                    raise FirstCallMissing(self._limiter.describe_draw_wait(rows, "no thread has written yet"))
                if is_unknown or caller not in self._callers.values():
                    return others
                if self._limiter.admits_draw(rows) and not self._missing_steps:
                    return others
                reason = self._missing_steps or self._limiter.describe_draw_wait(rows)
            else:
                if not self._readers and others is False and not self._limiter.admits_insert(rows):
                    raise FirstCallMissing(self._limiter.describe_insert_wait(rows, "no thread has drawn yet"))
                if self._limiter.admits_insert(rows):
                    return others
                if self._lacks_draws:  # the draws after the snapshot are not counted, but their rows are written again
                    self._lacks_draws, self._is_catching_up = False, True
                    self._condition.notify_all()
                    return others
                if is_unknown or caller not in self._readers:
                    return others
                reason = self._limiter.describe_insert_wait(rows)
            raise ServiceFault(f"A process that writes and draws waits for itself: {reason}")

    def _has_others(self, callers: set[str], caller: str) -> bool | None:
        """Return whether there are other callers; None if this actor was restarted and may not know them yet."""
        return True if callers - {caller} else None if self._is_restarted else False

    def flush(self, writer: str, session: str) -> Receipt:
        """Acknowledge all rollouts of a writer. Write a snapshot if necessary."""
        self._check_started()
        if self._folder is not None and self._acknowledged.get(writer) != self._sessions.get(writer):
            self.snapshot("snapshot")
        return self.receipt(writer, session)

    def _num_written(self, writer: str, session: str) -> int:
        known_session, written = self._sessions.get(writer, ("", 0))
        return written if known_session == session else 0

    def receipt(self, writer: str, session: str, caller: str | None = None) -> Receipt:
        """Return the numbers of written and acknowledged rollouts of a writer."""
        if caller is not None:
            self._callers[writer] = caller
        written = self._num_written(writer, session)
        known_session, acknowledged = self._acknowledged.get(writer, ("", 0))
        if self._folder is None:
            acknowledged = written
        elif known_session != session:
            acknowledged = 0
        has_other_readers = self._has_others(self._readers, self._callers.get(writer, ""))
        return Receipt(written, acknowledged, has_other_readers, self._start)

    # -- drawing -----------------------------------------------------------------------------------------------------
    async def draw(
        self,
        batch_size: int,
        count: int,
        updates: Sequence[BatchUpdate],
        request: Request = ("", 0),
        caller: str = "",
        waits: bool = True,
    ) -> SampledBatches:
        """Apply the learner's updates, and draw ``count`` batches as soon as the rate limiter admits them.

        Args:
            batch_size: The size of each batch.
            count: The number of batches.
            updates: Priorities and rewritten entries of earlier batches.
            request: The sender and the number of this request.
            caller: The reader's thread.
            waits: If False, return no batches instead of waiting for rows.
        """
        self._check_started()
        self.apply_feedback(updates)
        self._readers.add(caller)
        rows = batch_size * count
        batches: list[TensorDictBase] | None
        async with self._condition:
            if waits:
                batches = await self._wait_for(request, (True, rows), lambda: self._sample(batch_size, count))
            else:
                batches = self._sample(batch_size, count)
            if batches:
                if self._is_catching_up:
                    self._is_catching_up = False
                    self._limiter.count_from_now()
                self._limiter.drawn += rows
                self._condition.notify_all()
        packed = [pack_batch(batch) for batch in batches or ()]
        counts = len(self._buffer), *self._row_counts()
        has_other_writers = self._has_others(set(self._callers.values()), caller)
        return SampledBatches(
            packed, self._start_time, *counts, has_other_writers, self._folder is not None, self._start
        )

    def _sample(self, batch_size: int, count: int) -> list[TensorDictBase] | None:
        """Return batches, or None if more rows must be written first."""
        if not self._limiter.admits_draw(batch_size * count):
            return None
        try:
            batches = [self._buffer.draw(batch_size) for _ in range(count)]
        except RuntimeError as error:  # also the class of our errors about missing steps
            if not self._is_refilling:
                raise
            self._missing_steps = one_line(error)
            return None
        self._is_refilling = False
        return batches

    def apply_feedback(self, updates: Sequence[BatchUpdate]) -> None:
        """Apply priorities and rewritten entries of batches."""
        for update in updates:
            self._apply_update(update)

    def _apply_update(self, update: BatchUpdate) -> None:
        if update.start_time != self._start_time:
            return  # after a restart, a cell may contain another row with the same stamp
        batch = unpack_batch(update.shape, [None] * len(update.shape), update.arrays)
        if update.keys is None:
            self._buffer.update_tensordict_priority(batch)
        else:
            self._buffer.write_back(batch, update.keys)

    def status(self) -> tuple[int, int, int]:
        """Return the numbers of stored, written and drawn rows."""
        return len(self._buffer), *self._row_counts()

    def _row_counts(self) -> tuple[int, int]:
        return self._limiter.inserted, self._limiter.drawn

    # -- snapshots ---------------------------------------------------------------------------------------------------
    def snapshot(self, kind: str) -> str | None:
        """Write the complete state atomically, remove old snapshots, and return the new snapshot's name.

        Without a folder, return None.
        """
        self._check_started()
        if self._folder is None:
            return None
        name = f"{kind}_{self._next_snapshot:08d}"
        sessions = {writer: [session, written] for writer, (session, written) in self._sessions.items()}
        inserted, drawn = self._row_counts()
        write_state_folder(
            self._folder / name,
            {
                "version": VERSION,
                "inserted": inserted,
                "drawn": drawn,
                "limiter": self._limiter.state,
                "sessions": sessions,
                "buffer": self._buffer.state_dict(copy=False),
            },
        )
        self._next_snapshot += 1
        self._acknowledged = dict(self._sessions)
        for old_folder in [folder for folder in self._snapshots() if folder.name.startswith(kind)][:-_MAX_SNAPSHOTS]:
            shutil.rmtree(old_folder, ignore_errors=True)
        return name

    def _snapshots(self) -> list[Path]:
        """Return the existing snapshots from the oldest to the newest."""
        assert self._folder is not None
        folders = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted((folder for folder in folders if SNAPSHOT_NAME.fullmatch(folder.name)), key=_snapshot_number)

    def _restore_first(self, resumed: str | None, is_restarted: bool) -> None:
        snapshots = [] if self._folder is None else self._snapshots()
        if is_restarted and snapshots:
            self._restore(snapshots[-1])
            return
        resumed_folder = None if resumed is None else Path(resumed)
        is_own_run = resumed_folder is not None and resumed_folder.parent == self._folder
        if snapshots and not is_own_run:
            raise ServiceFault(
                f"folder={self._folder} must not contain snapshots of another replay service. Resume its run "
                "(ckpt_path), or use another folder."
            )
        if resumed_folder is None:
            return
        self._restore(resumed_folder)
        if is_own_run:
            for later_folder in snapshots[snapshots.index(resumed_folder) + 1 :]:
                shutil.rmtree(later_folder, ignore_errors=True)

    def _restore(self, folder: Path) -> None:
        try:
            state = read_state_folder(folder)
            if state["version"] != VERSION:
                raise ValueError(f"it has version {state['version']!r}, this release reads {VERSION}")
            sessions = {
                str(writer): (str(session[0]), int(session[1])) for writer, session in state["sessions"].items()
            }
            inserted, drawn = int(state["inserted"]), int(state["drawn"])
            changed_ratio = self._limiter.restore(inserted, drawn, state.get("limiter"))
            self._buffer.load_state_dict(state["buffer"])
        except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
            raise ServiceFault(f"The replay service's snapshot {folder} cannot be read: {error}.") from error
        self._changed_ratio, self._start = changed_ratio, "with an earlier snapshot"
        self._sessions, self._acknowledged = sessions, dict(sessions)
        self._next_snapshot = _snapshot_number(folder) + 1


def _is_restarted() -> bool:
    """Return True if Ray has restarted this actor."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns about its own API
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _snapshot_number(folder: Path) -> int:
    match = SNAPSHOT_NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[2])


def buffer_properties(buffer: ExperienceBuffer) -> dict[str, Any]:
    """Return the properties that must be equal in a service and its clients."""
    storage, sampler, writer = buffer.parts
    return {
        "buffer": type(buffer).__name__,
        "sampler": type(sampler).__name__,
        "max_size": int(storage.max_size),
        "num_envs": writer.num_envs,
        "n_steps": buffer.n_steps,
    }
