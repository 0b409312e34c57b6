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
from typing import Any

import torch

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.files import read_state_folder, write_state_folder
from torchrl_lightning.environments.seeds import spawn_seed
from torchrl_lightning.ray._serialization import Arrays, BatchUpdate, Receipt, SampledBatches, pack_batch, unpack_batch
from torchrl_lightning.ray.cluster import ServiceFault, installed_versions
from torchrl_lightning.ray.rate_limiter import RateLimiter
from torchrl_lightning.replay import ExperienceBuffer

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
        try:
            self._buffer, self._limiter = pickle.loads(zlib.decompress(payload))
            if shard:
                self._buffer.generator.manual_seed(spawn_seed(self._buffer.generator.initial_seed(), "shard", shard))
            self._restore_first(resumed, _is_restarted())
        except UserError as fault:
            self._fault = fault
        except Exception as error:  # after a raised error, Ray would restart the actor repeatedly
            self._fault = ServiceFault(f"The replay service cannot start: {type(error).__name__}: {error}")

    def describe(self) -> dict[str, Any]:
        """Return the versions, buffer and limits that a client compares; raise an error if the start failed."""
        if self._fault is not None:
            raise self._fault
        properties = buffer_properties(self._buffer)
        return {"versions": installed_versions(), "buffer": properties, "limits": self._limiter.settings}

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
    ) -> Receipt:
        """Write a rollout ``[T, N, *F]`` as soon as the rate limiter admits the rollout.

        In the environments ``cut_envs``, a new trajectory begins with the rollout. ``check_successors`` enables the
        comparison of the rollout's rows with stored successors.

        A rollout is skipped if it is already written, or if earlier rollouts were lost when this actor died. The writer
        learns from the receipt which rollouts it must send again.
        """
        if number != self._num_written(writer, session):
            return self.receipt(writer, session)
        shape = next(iter(arrays.values())).shape[:2]
        async with self._condition:
            await self._wait_until_admitted(lambda: self._limiter.admits_insert(shape[0] * shape[1]))
            if number == self._num_written(writer, session):
                rollout = unpack_batch(shape, ["time", None], arrays)
                self._buffer.writer.check_successors = check_successors
                if cut_envs:
                    self._buffer.writer.cut(torch.tensor(cut_envs))
                self._buffer.extend(rollout, torch.tensor(env_ids))
                self._limiter.inserted += rollout.numel()
                self._sessions[writer] = session, number + 1
                self._condition.notify_all()
        return self.receipt(writer, session)

    async def _wait_until_admitted(self, admits: Callable[[], bool]) -> None:
        """Wait until the rate limiter admits a request. If the limiter raises an error, wake all waiting requests."""
        try:
            await self._condition.wait_for(admits)
        except UserError:
            self._condition.notify_all()
            raise

    def flush(self, writer: str, session: str) -> Receipt:
        """Acknowledge all rollouts of a writer. Write a snapshot if necessary."""
        if self._folder is not None and self._acknowledged.get(writer) != self._sessions.get(writer):
            self.snapshot("snapshot")
        return self.receipt(writer, session)

    def _num_written(self, writer: str, session: str) -> int:
        known_session, written = self._sessions.get(writer, ("", 0))
        return written if known_session == session else 0

    def receipt(self, writer: str, session: str) -> Receipt:
        """Return the numbers of written and acknowledged rollouts of a writer."""
        written = self._num_written(writer, session)
        known_session, acknowledged = self._acknowledged.get(writer, ("", 0))
        return Receipt(written, written if self._folder is None else acknowledged if known_session == session else 0)

    # -- drawing -----------------------------------------------------------------------------------------------------
    async def draw(self, batch_size: int, count: int, updates: Sequence[BatchUpdate]) -> SampledBatches:
        """Apply the learner's updates, and draw ``count`` batches as soon as the rate limiter admits them."""
        self.apply_feedback(updates)
        rows = batch_size * count
        async with self._condition:
            await self._wait_until_admitted(lambda: self._limiter.admits_draw(rows))
            batches = [self._buffer.draw(batch_size) for _ in range(count)]
            self._limiter.drawn += rows
            self._condition.notify_all()
        packed = [pack_batch(batch) for batch in batches]
        return SampledBatches(packed, self._start_time, len(self._buffer), *self._row_counts())

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
            self._buffer.load_state_dict(state["buffer"])
        except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
            raise ServiceFault(f"The replay service's snapshot {folder} cannot be read: {error}.") from error
        self._limiter.restore(inserted, drawn)
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
