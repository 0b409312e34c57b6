"""A replay buffer in actors of a Ray cluster. Collectors write rows, and learners draw batches."""

from __future__ import annotations

import logging
import secrets
import sys
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from torchrl_lightning._core.keys import INDEX, MASK, SOURCE
from torchrl_lightning._core.protocols import SamplerApi
from torchrl_lightning._core.rank_metrics import Mean, Sum
from torchrl_lightning._core.ranks import this_rank
from torchrl_lightning._core.state import sequence, state_error
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import boolean, check_defaults, integer
from torchrl_lightning.ray._serialization import BatchUpdate, SampledBatches, as_arrays, pack_batch, unpack_batch
from torchrl_lightning.ray._service_actor import SNAPSHOT_NAME, ServiceActor, buffer_properties
from torchrl_lightning.ray._service_writer import ServiceWriter, Shard, call_shard, current_caller, merged_knowledge
from torchrl_lightning.ray._waits import demand_of
from torchrl_lightning.ray.cluster import ServiceFault, connect, installed_versions
from torchrl_lightning.ray.rate_limiter import RateLimiter
from torchrl_lightning.replay import ExperienceBuffer
from torchrl_lightning.replay.builders import excluded_keys, find_prioritized
from torchrl_lightning.replay.row_order import time_major

logger = logging.getLogger(__name__)

_NAMESPACE = "torchrl_lightning"


class ReplayService(ConfigSafe):
    """Store a replay buffer in one or several named actors of a Ray cluster, and draw batches from it.

    Pass the service as ``source=`` to a ``ReplayDataModule``. The module writes its collector's rollouts into the
    service. With a :class:`RayCollector` each actor writes directly, and the learner receives only rewards and episode
    ends. A row can be drawn as soon as the service has stored it. Batches are requested several calls before their use.
    The entry ``source`` identifies the shard of a batch. Priorities and rewritten entries are sent back with the next
    call, with the stamps of their rows.

    With a ``folder`` the service survives a crash. Ray restarts the service, the service loads its newest snapshot, and
    writers send the missing rollouts once. Writers keep their rollouts until a snapshot contains them. When a writer
    keeps the maximum number of rollouts (``unacknowledged``), it requests a snapshot and waits. Priorities and
    rewritten entries of lost rows are also lost.

    The service ends with the run that started it. With ``keep``, the service continues, and one later run at a time can
    use it. Additional learners use ``join``.

    Args:
        buffer: An empty buffer with any sampler. Each shard gets a copy, and this buffer stays empty.
        name: The name of the service in the cluster; a random name by default.
        shards: The number of actors. The environments are divided evenly among the actors, so the number of
            environments must be a multiple of ``shards``. Each batch comes from one shard; all shards are used in turn.
        folder: The folder for snapshots. All machines that may run the service must be able to use it. A
            ``ReplayDataModule`` sets it to ``service`` below the trainer's root folder. With None the service begins
            empty after a crash. Writers log the number of lost rows, and the run continues with new rows.
        batches_per_call: The number of batches that one call returns.
        calls_in_flight: The number of calls that are pending during learning. With more calls, batches are older when
            they are used.
        unacknowledged: The maximum number of rollouts that each writer keeps.
        samples_per_insert: The mean number of draws of each row, see :class:`RateLimiter`. Set it for learners and
            writers without other coordination. A ``ReplayDataModule`` coordinates them by its ``frames_per_update``.
        error_buffer: The maximum deviation from ``samples_per_insert``, in draws. See :class:`RateLimiter` for the
            minimum.
        min_size: The number of rows in each shard before the first draw. For a running service omit
            ``samples_per_insert``, ``error_buffer`` and ``min_size``, or give the same values.
        keep: Leave the service running at the end of the run.
        join: Draw from a service that another process has started, and leave it running at the end. ``keep`` and
            ``remote_configs`` cannot be set together with ``join``.
        remote_configs: The resources of each shard, as for ``ray.remote``. By default processors are not reserved.
        ray_init_config: Arguments of ``ray.init``, which is called if this process is not connected to a cluster yet.

    Raises:
        ValueError: A number is out of range, or the buffer is not empty.
        ClusterFault: Ray is not installed, or the cluster does not exist. This error is also a ValueError.
        ServiceFault: Another run uses a service of this name, or the running service has another buffer or other
            versions. Or the service cannot read its snapshot, or rejects the written rows. It is also a ValueError.

    Source:
        Horgan et al. (2018), Distributed Prioritized Experience Replay, https://arxiv.org/abs/1803.00933

    Examples:
        >>> service = ReplayService(ExperienceBuffer(num_envs=4), shards=2)
        >>> service.shards, service.running
        (2, False)
    """

    accepts_shared_rows = False

    def __init__(
        self,
        buffer: ExperienceBuffer,
        *,
        name: str | None = None,
        shards: int = 1,
        folder: str | Path | None = None,
        batches_per_call: int = 8,
        calls_in_flight: int = 2,
        unacknowledged: int = 64,
        samples_per_insert: float | None = None,
        error_buffer: float | None = None,
        min_size: int = 1,
        keep: bool = False,
        join: bool = False,
        remote_configs: Mapping[str, Any] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.shards = integer(shards, "shards")
        self.batches_per_call = integer(batches_per_call, "batches_per_call")
        self.calls_in_flight = integer(calls_in_flight, "calls_in_flight")
        self.unacknowledged = integer(unacknowledged, "unacknowledged")
        self._limiter = RateLimiter(samples_per_insert, error_buffer, min_size)
        self.samples_per_insert = samples_per_insert
        _check_buffer(buffer, self.shards)
        if (keep or join) and name is None:
            raise ValueError(
                "name must be set with keep=True or join=True, got None. Set the name of the replay service."
            )
        if boolean(join, "join"):
            others = {"keep": (keep, False), "remote_configs": (remote_configs or None, None)}
            check_defaults("with join=True", "let this run start the service", **others)
        self.buffer, self.buffers, self.keep, self.join = buffer, [buffer], keep, join
        self.name = secrets.token_hex(4) if name is None else name
        self.folder = None if folder is None else Path(folder).absolute()
        self.remote_configs = {"num_cpus": 0, **(remote_configs or {})}
        self.ray_init_config = dict(ray_init_config or {})
        self._ray: Any = None
        self._owns_ray = False
        self._actors: list[Any] = []
        self._shards: list[Shard] = []
        self._owner: Any = None  # an actor that ends with this run and marks the service as in use
        self._resumed: list[Path | None] = [None] * self.shards
        self._writer: ServiceWriter | None = None
        self._cut_envs: set[int] = set()  # the next rows of these environments begin a new trajectory
        # reference, shard, number of batches served before the request
        self._pending_calls: deque[tuple[Any, int, int]] = deque()
        # batch, shard, start time of the shard, number of batches served before the request
        self._batches: deque[tuple[Any, int, int, int]] = deque()
        self._batch_size = 0
        self._updates: list[list[Any]] = [[] for _ in range(self.shards)]  # sent with the next call
        self._num_requested = self._num_served = 0
        self._batch_age = 0
        self._counts = [(0, 0, 0)] * self.shards  # size, rows written and rows drawn of each shard
        self._start_times = [0] * self.shards  # start time of each shard at its last answer
        self._client = secrets.token_hex(8)  # the sender of requests for batches
        self._has_other_writers: bool | None = None  # whether other threads have written; None if it is unknown
        self._waits = True  # False if requests return no batches instead of waiting for rows

    @property
    def running(self) -> bool:
        """True if this process has started or joined the service."""
        return bool(self._actors)

    def __len__(self) -> int:
        if self.running and not any(size for size, *_ in self._counts):
            self._counts = [call_shard(shard, "the size", shard.actor.status.remote) for shard in self._shards]
        return sum(size for size, *_ in self._counts)

    def metrics(self) -> dict[str, float]:
        """Return the last batch's age in updates, the service's size, and the number of draws per written row."""
        size, inserted, drawn = (sum(counts) for counts in zip(*self._counts, strict=True))
        draws = Mean(drawn / max(inserted, 1), max(inserted, 1))
        # With ``join``, the ranks of a run draw from one service, and each of them counts the same rows.
        rows = float(size) if self.join else Sum(size)
        return {"replay/batch_age": float(self._batch_age), "replay/size": rows, "replay/samples_per_insert": draws}

    # -- writing -----------------------------------------------------------------------------------------------------
    def writer(self, name: str) -> ServiceWriter:
        """Return a writer for another process; start the service if it does not run."""
        self._start()
        num_envs = self.buffer.parts[2].num_envs
        ring_length = self.buffer.storage.max_size // num_envs
        return ServiceWriter(self._shards, num_envs, name, self.unacknowledged, ring_length)

    def extend(self, data: TensorDictBase, env_ids: torch.Tensor | None = None) -> None:
        """Write steps in the format of :meth:`ExperienceBuffer.extend`. They may arrive only after the next call."""
        ids = self.buffer.writer.check_ids(env_ids).tolist()
        if self._writer is None:
            client = f" of {self._client}" if self.join else ""  # programs that join a service have equal ranks
            self._writer = self.writer(f"rank {this_rank()}{client}")
        rows = time_major(data, len(ids), None, self.buffer.time_dim).clone()  # a collector may reuse its memory
        cut = [env for env in ids if env in self._cut_envs]
        compares = self.buffer.writer.check_successors
        self._writer.write(as_arrays(rows.reshape(-1, len(ids)).transpose(0, 1)), ids, cut, compares)
        self._cut_envs.difference_update(cut)

    def cut(self, env_ids: torch.Tensor | None = None) -> None:
        """End the running trajectories, for example after a restart, so that the next rows do not continue them.

        Args:
            env_ids: The environments; None for all.
        """
        self._cut_envs.update(self.buffer.writer.check_ids(env_ids).tolist())

    @property
    def excluded_keys(self) -> list[str]:
        """The entries of a rollout that the buffer does not use."""
        return excluded_keys(self.buffer)

    # -- drawing -----------------------------------------------------------------------------------------------------
    def draw(self, batch_size: int) -> TensorDictBase:
        """Return a batch ``[batch_size]`` of rows or windows from one of the shards.

        Raises:
            ServiceFault: The service waits for rows that only this thread writes, or rejects the request.
        """
        self._begin_draw(batch_size)
        while not self._batches:
            self._request_ahead()
            self._receive(waits=True)
        self._request_ahead()
        packed, shard, start_time, served_at_request = self._batches.popleft()
        batch = unpack_batch(*packed)
        self._batch_age = self._num_served - served_at_request
        self._num_served += 1
        return batch.set(SOURCE, torch.full(batch.batch_size, start_time * self.shards + shard))

    def can_draw(self, batch_size: int) -> bool:
        """Return False if more rows must be written before the next :meth:`draw`.

        After the first call, requests in advance do not wait for rows either. A caller that also collects the rows
        uses this method, because the rows are lost if a service without a folder dies.
        """
        self._begin_draw(batch_size)
        self._waits = False
        while not self._batches:
            self._request_ahead()
            if not self._receive(waits=False):
                return False
        return True

    def _begin_draw(self, batch_size: int) -> None:
        self._start()
        if batch_size != self._batch_size:
            self._batch_size = batch_size
            self._pending_calls.clear()
            self._batches.clear()

    def _request_ahead(self) -> None:
        while len(self._pending_calls) < self.calls_in_flight:
            shard = self._num_requested % self.shards
            self._pending_calls.append((self._request(shard, self._num_requested), shard, self._num_served))
            self._num_requested += 1

    def _request(self, shard: int, number: int, waits: bool | None = None) -> Any:
        updates, self._updates[shard] = self._updates[shard], []
        arguments = self._batch_size, self.batches_per_call, updates, (self._client, number), current_caller()
        return self._actors[shard].draw.remote(*arguments, self._waits if waits is None else waits)

    def _receive(self, *, waits: bool) -> bool:
        """Receive the oldest pending call; return False if it has no batches, because too few rows are stored."""
        ref, shard, served_at_request = self._pending_calls.popleft()
        number = self._num_requested - len(self._pending_calls) - 1

        def check_wait(request: Any) -> None:
            try:
                self._check_wait(shard, number)
            except ServiceFault:  # the rows may be written before the next draw
                self._pending_calls.appendleft((request, shard, served_at_request))
                raise

        send = partial(self._request, shard, number)
        sampled = call_shard(self._shards[shard], "batches", send, pending=ref, check_wait=check_wait)
        if not sampled.batches:  # rows may have been lost, or written since the request
            if self._writer is not None:
                self._writer.wait_until_written(shard)
            sampled = call_shard(self._shards[shard], "batches", send, waits, check_wait=check_wait)
        self._note_answer(shard, sampled)
        if not sampled.batches:
            self._pending_calls.appendleft((None, shard, served_at_request))
        self._batches.extend((batch, shard, sampled.start_time, served_at_request) for batch in sampled.batches)
        return bool(sampled.batches)

    def _check_wait(self, shard: int, number: int) -> None:
        """Raise a ServiceFault if a pending call waits for rows that only this thread writes."""
        if self._writer is not None:
            self._writer.wait_until_written(shard)
        arguments = (self._client, number), current_caller(), self._has_other_writers
        send = self._actors[shard].check_wait.remote
        others = call_shard(self._shards[shard], "the check of a wait", send, *arguments)
        self._has_other_writers = merged_knowledge(self._has_other_writers, others)

    def _note_answer(self, shard: int, sampled: SampledBatches) -> None:
        has_restarted = self._start_times[shard] not in (0, sampled.start_time)
        if has_restarted and not sampled.has_folder and self._writer is None:  # a writer logs its own lost rows
            logger.warning(
                "%s died and begins %s: its rows are lost, %d at the last draw. It continues with new rows. Set "
                "folder, so that snapshots keep its rows.",
                self._shards[shard].name,
                sampled.start,
                self._counts[shard][0],
            )
        self._start_times[shard] = sampled.start_time
        self._counts[shard] = sampled.size, sampled.inserted, sampled.drawn
        self._has_other_writers = merged_knowledge(self._has_other_writers, sampled.has_other_writers)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Read the priorities that a loss wrote into a batch, and send them with the next call."""
        if find_prioritized(self.buffer.sampler) is not None:
            self._send_update(data, [self.buffer.priority_key, INDEX, "write_generation"], None)

    def write_back(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> None:
        """Send rewritten entries of a batch with the next call, see :meth:`ExperienceBuffer.write_back`."""
        self._send_update(batch, [*keys, INDEX, "write_position", MASK], list(keys))

    def _send_update(self, batch: TensorDictBase, entries: list[Any], keys: list[Any] | None) -> None:
        start_time, shard = divmod(int(batch[SOURCE].flatten()[0]), self.shards)
        shape, _, arrays = pack_batch(batch.select(*entries, strict=False).detach())
        self._updates[shard].append(BatchUpdate(start_time, shape, arrays, keys))

    # -- state -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Write snapshots if the service runs with a folder. Return the newest snapshots' location or None."""
        if self.running and self.folder is not None:
            self._send_pending()
            names = [self._write_checkpoint(shard) for shard in range(self.shards)]
            self._resumed = [_shard_folder(self.folder, shard) / name for shard, name in enumerate(names)]
        first = self._resumed[0]
        folder = None if first is None else str(first.parents[1])
        return {
            "folder": folder,
            "snapshots": [None if snapshot is None else snapshot.name for snapshot in self._resumed],
        }

    def _write_checkpoint(self, shard: int) -> str:
        """Write a snapshot of a shard and return its name. Repeat it if the shard has died and lacks rollouts."""
        while True:
            snapshot = self._actors[shard].snapshot.remote
            name: str = call_shard(self._shards[shard], "the snapshot for a checkpoint", snapshot, "checkpoint")
            if self._writer is None or not self._writer.wait_until_written(shard):
                return name

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a snapshot from this run's folder, or else from the folder of the run that wrote the snapshot.

        Raises:
            ValueError: The service runs already, the state is invalid, or it has another number of shards.
        """
        if self.running:
            raise ValueError("The replay service runs already. Load the state before its first use.")
        names = sequence(state_dict.get("snapshots"), "snapshots")
        if len(names) != self.shards:
            raise ValueError(f"shards must be {len(names)} as in the state, got {self.shards}.")
        if any(name is None for name in names):
            logger.warning(
                "the checkpoint has no snapshot of the replay service, because it had no folder; it starts empty. Set "
                "folder to save its rows."
            )
            return
        if not all(isinstance(name, str) and SNAPSHOT_NAME.fullmatch(name) for name in names):
            raise state_error(names, "snapshots", "names of snapshots")
        recorded = Path(str(state_dict.get("folder")))
        for shard, name in enumerate(names):
            folders = [_shard_folder(folder, shard) / name for folder in (self.folder, recorded) if folder is not None]
            self._resumed[shard] = next((folder for folder in folders if folder.is_dir()), folders[-1])

    # -- the service -------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        if self.running:
            return
        self._ray, has_connected = connect(self.ray_init_config)
        self._owns_ray |= has_connected
        names = [f"{self.name}/{shard}" for shard in range(self.shards)]
        running_actors = [self._find_actor(name) for name in names]
        if any(running_actors) and self._find_actor(f"{self.name}/{self.shards}"):
            raise ServiceFault(
                f"The replay service name={self.name!r} has more shards than shards={self.shards}. Use the number of "
                "its first run."
            )
        if self.join and not all(running_actors):
            raise ServiceFault(f"No replay service name={self.name!r} runs in this cluster to join. Start it first.")
        if any(running_actors) and not (self.keep or self.join):
            raise ServiceFault(
                f"A replay service name={self.name!r} runs in this cluster already. Set another name, or leave it out."
            )
        if self.keep and not self.join:
            self._owner = self._claim_name()
        self._actors = [running_actors[shard] or self._build_actor(shard, name) for shard, name in enumerate(names)]
        demand = demand_of(self.remote_configs)
        self._shards = [
            Shard(actor, f"shard {shard} of the replay service {self.name!r}", None if is_running else demand)
            for shard, (actor, is_running) in enumerate(zip(self._actors, running_actors, strict=True))
        ]
        changed_ratios = []
        for shard, is_running in zip(self._shards, running_actors, strict=True):
            running = call_shard(shard, "the start", shard.actor.describe.remote, starts=True)
            self._check_running(running)
            changed_ratios += [] if is_running else [running["changed_ratio"]]
        if any(changed_ratios):
            logger.warning("%s", next(filter(None, changed_ratios)))

    def _build_actor(self, shard: int, name: str) -> Any:
        lifetime = {"lifetime": "detached"} if self.keep else {}
        actor_class = self._ray.remote(ServiceActor).options(
            name=name, namespace=_NAMESPACE, max_restarts=-1, max_task_retries=0, **lifetime, **self.remote_configs
        )
        folder = None if self.folder is None else str(_shard_folder(self.folder, shard))
        snapshot = self._resumed[shard]
        # Ray stores small arguments with the actor. It stores larger arguments with the sender, which may have exited.
        payload = zlib.compress(cloudpickle.dumps((self.buffer, self._limiter)))
        try:
            return actor_class.remote(sys.path, payload, shard, folder, None if snapshot is None else str(snapshot))
        except ValueError as error:  # another run has just started a service of this name
            raise ServiceFault(
                f"A replay service name={self.name!r} was just started by another run. Set another name."
            ) from error

    def _find_actor(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name, namespace=_NAMESPACE)
        except ValueError:
            return None

    def _claim_name(self) -> Any:
        """Mark the service as used by this run. The mark is an actor that ends with the run."""
        owner_class = self._ray.remote(type("ReplayServiceOwner", (), {}))
        try:
            return owner_class.options(name=f"{self.name}/owner", namespace=_NAMESPACE, num_cpus=0).remote()
        except ValueError as error:
            raise ServiceFault(
                f"Another run uses the replay service name={self.name!r}. Wait for its end, or set another name."
            ) from error

    def _check_running(self, running: dict[str, Any]) -> None:
        local = {"versions": installed_versions(), "buffer": buffer_properties(self.buffer)}
        for kind in ("versions", "buffer"):
            for name, value in local[kind].items():
                if running[kind].get(name) != value:
                    raise ServiceFault(
                        f"The replay service name={self.name!r} has {name} {running[kind].get(name)!r}, but this "
                        f"run has {value!r}. Use the same, or another name."
                    )
        # A setting with its default value is compatible with any value in the running service.
        defaults = RateLimiter().settings
        for name, value in self._limiter.settings.items():
            running_value = running.get("limits", defaults)[name]
            if value not in (defaults[name], running_value):
                raise ServiceFault(
                    f"The replay service name={self.name!r} has {name}={running_value}, but this run has {value}. "
                    "Leave it out, use the same, or set another name."
                )

    def _send_pending(self) -> None:
        """Send pending data, so that a snapshot contains it."""
        if self._writer is not None:
            self._writer.wait_until_written()
        for shard, updates in enumerate(self._updates):
            if updates:
                self._updates[shard] = []
                apply = self._actors[shard].apply_feedback.remote
                call_shard(self._shards[shard], "the feedback for batches", apply, updates)

    def shutdown(self) -> None:
        """End the service unless ``keep`` or ``join`` is set, and disconnect from the cluster if it has connected.

        Repeated calls are safe.
        """
        actors, self._actors = self._actors, []
        self._pending_calls.clear()
        self._batches.clear()
        self._writer = None
        try:
            if actors and self._ray.is_initialized():
                for actor in [] if self.keep or self.join else actors:
                    self._ray.kill(actor)
                if self._owner is not None:
                    self._ray.kill(self._owner)
        finally:
            self._owner = None
            if self._owns_ray:
                self._owns_ray = False
                self._ray.shutdown()


def _check_buffer(buffer: ExperienceBuffer, shards: int) -> None:
    num_envs = buffer.parts[2].num_envs
    if len(buffer):
        raise ValueError(f"buffer must be empty for a replay service, got {len(buffer)} rows.")
    if num_envs % shards:
        raise ValueError(f"shards must divide the {num_envs} environments, got {shards}.")
    if shards > 1 and not SamplerApi.of(buffer.sampler).supports_uneven_rings:
        raise ValueError(
            f"shards must be 1 with a {type(buffer.sampler).__name__}, which needs evenly filled rings, got {shards}. "
            "Use one of our samplers, or shards=1."
        )


def _shard_folder(folder: Path, shard: int) -> Path:
    return folder / f"shard_{shard}"
