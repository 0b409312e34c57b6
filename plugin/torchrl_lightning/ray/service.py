"""A replay buffer in actors of a Ray cluster: collectors write into it and learners draw from it."""

from __future__ import annotations

import logging
import secrets
import sys
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from torchrl_lightning._core.keys import INDEX, MASK, SOURCE
from torchrl_lightning._core.protocols import SamplerApi
from torchrl_lightning._core.ranks import this_rank
from torchrl_lightning._core.state import sequence, state_error
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import boolean, check_defaults, integer
from torchrl_lightning.ray._service_actor import NAME, ServiceActor, described
from torchrl_lightning.ray._service_writer import ServiceWriter, answer
from torchrl_lightning.ray._wire import Learned, as_arrays, packed, unpacked
from torchrl_lightning.ray.cluster import ServiceFault, installed, joined
from torchrl_lightning.ray.rate_limiter import RateLimiter
from torchrl_lightning.replay import ExperienceBuffer
from torchrl_lightning.replay.builders import excluded_keys, prioritized_in, time_major

logger = logging.getLogger(__name__)

_NAMESPACE = "torchrl_lightning"


class ReplayService(ConfigSafe):
    """Store a replay buffer in one or several named actors of a Ray cluster, and draw batches from it.

    Pass it as ``source=`` to a ``ReplayDataModule``. The module writes its collector's rollouts into the service. With
    a :class:`RayCollector` each actor writes directly, and the learner receives only rewards and episode ends. A row
    can be drawn as soon as it has arrived. Batches are drawn some calls ahead, and the entry ``source`` identifies the
    shard of each. Priorities and rewritten entries are returned with the next call, with the stamps of their rows.

    With a ``folder`` the service survives a crash. Ray restarts it, it loads its newest snapshot, and writers send the
    rollouts that the snapshot lacks, each once. Writers keep their rollouts until a snapshot contains them. With
    ``unacknowledged`` kept rollouts they request a snapshot and wait. Priorities and rewritten entries of lost rows are
    also lost.

    The service ends with the run that started it. With ``keep`` a later run can continue with it, one run at a time.
    Further learners ``join`` it.

    Args:
        buffer: The buffer of each shard: an empty buffer with any sampler. The shards get copies; it stays empty here.
        name: The name of the service within the cluster; a random one by default.
        shards: The number of actors that divide the environments among them; it must divide the number of environments.
            Each batch comes from one shard, in turn.
        folder: The folder for snapshots, reachable from every machine that may run the service. A ``ReplayDataModule``
            sets it to ``service`` below the trainer's root folder. With None a crash loses the content, and the run
            continues with new rows.
        batches_per_call: The number of batches that one call returns.
        calls_in_flight: The number of pending calls during learning: how far ahead batches are drawn.
        unacknowledged: The maximum number of rollouts that each writer keeps.
        samples_per_insert: The mean number of draws of each row, for learners and writers without other coordination;
            see :class:`RateLimiter`. A ``ReplayDataModule`` coordinates them by its ``frames_per_update``.
        error_buffer: The tolerance of that ratio in draws, on either side; see :class:`RateLimiter` for its minimum.
        min_size: The number of rows in each shard before the first draw. For a running service omit
            ``samples_per_insert``, ``error_buffer`` and ``min_size``, or give the same values.
        keep: Leave the service running at the end.
        join: Draw from a service that another process has started, and leave it running at the end. It excludes
            ``keep`` and ``remote_configs``.
        remote_configs: The resources of each shard, as for ``ray.remote``; by default no reserved processor.
        ray_init_config: Arguments of ``ray.init``, if this process is not connected to a cluster yet.

    Raises:
        ValueError: A number is out of range, or the buffer is not empty.
        ClusterFault: Ray is not installed, or the cluster does not exist; also a ValueError.
        ServiceFault: Another run has a service of this name, the running service has another buffer or other versions,
            its snapshot cannot be read, or it rejects the written rows; also a ValueError.

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
            raise ValueError("A replay service with keep=True or join=True is found by its name; give it one.")
        if boolean(join, "join"):
            others = {"keep": (keep, False), "remote_configs": (remote_configs or None, None)}
            check_defaults("beside join=True", "let this run start the service", **others)
        self.buffer, self.buffers, self.keep, self.join = buffer, [buffer], keep, join
        self.name = secrets.token_hex(4) if name is None else name
        self.folder = None if folder is None else Path(folder).absolute()
        self.remote_configs = {"num_cpus": 0, **(remote_configs or {})}
        self.ray_init_config = dict(ray_init_config or {})
        self._ray: Any = None
        self._owns_ray = False
        self._actors: list[Any] = []
        self._owner: Any = None  # an actor that ends with this run, and marks the service as in use until then
        self._resumed: list[Path | None] = [None] * self.shards
        self._writer: ServiceWriter | None = None
        self._cut: set[int] = set()  # environments that begin a new trajectory with their next rows
        self._calls: deque[tuple[Any, int, int]] = deque()  # pending requests: reference, shard, batches served before
        self._drawn: deque[tuple[Any, int, int, int]] = deque()  # batch, shard, its life, batches served at the request
        self._batch_size = 0
        self._learned: list[list[Any]] = [[] for _ in range(self.shards)]  # sent with the next call
        self._asked = self._served = 0
        self._age = 0
        self._counts = [(0, 0, 0)] * self.shards  # size, rows written and rows drawn of each shard

    @property
    def running(self) -> bool:
        """Whether this process has started or joined the service."""
        return bool(self._actors)

    def __len__(self) -> int:
        if self.running and not any(size for size, *_ in self._counts):
            self._counts = [answer(actor.status.remote) for actor in self._actors]
        return sum(size for size, *_ in self._counts)

    def metrics(self) -> dict[str, float]:
        """Return the last batch's age in updates, the service's size, and the number of draws per written row."""
        size, inserted, drawn = (sum(each) for each in zip(*self._counts, strict=True))
        return {
            "replay/batch_age": float(self._age),
            "replay/size": float(size),
            "replay/samples_per_insert": drawn / max(inserted, 1),
        }

    # -- writing -----------------------------------------------------------------------------------------------------
    def writer(self, name: str) -> ServiceWriter:
        """Return a writer for another process; start the service if it does not run."""
        self._start()
        return ServiceWriter(self._actors, self.buffer.parts[2].num_envs, name, self.unacknowledged)

    def extend(self, data: TensorDictBase, env_ids: torch.Tensor | None = None) -> None:
        """Write steps in the format of :meth:`ExperienceBuffer.extend`; they may arrive after the next call."""
        if self._writer is None:
            self._writer = self.writer(f"rank {this_rank()}")
        ids = list(range(self.buffer.parts[2].num_envs)) if env_ids is None else env_ids.tolist()
        rows = time_major(data, len(ids), None).clone()  # a collector may reuse its memory
        cut = [env for env in ids if env in self._cut]
        compares = self.buffer.writer.check_successors
        self._writer.write(as_arrays(rows.reshape(-1, len(ids)).transpose(0, 1)), ids, cut, compares)
        self._cut.difference_update(cut)

    def cut(self, env_ids: torch.Tensor | None = None) -> None:
        """End the running trajectories: the next rows do not continue them, for example after a restart.

        Args:
            env_ids: The environments; None for all.
        """
        self._cut.update(self.buffer.writer.check_ids(env_ids).tolist())

    @property
    def left_out(self) -> list[str]:
        """Entries of a rollout that the buffer does not use."""
        return excluded_keys(self.buffer)

    # -- drawing -----------------------------------------------------------------------------------------------------
    def draw(self, batch_size: int) -> TensorDictBase:
        """Return a batch ``[batch_size]`` of rows or windows from one of the shards."""
        self._start()
        if batch_size != self._batch_size:
            self._batch_size = batch_size
            self._calls.clear()
            self._drawn.clear()
        while not self._drawn:
            self._ask_ahead()
            self._receive()
        self._ask_ahead()
        packed, shard, life, asked = self._drawn.popleft()
        batch = unpacked(*packed)
        self._age = self._served - asked
        self._served += 1
        return batch.set(SOURCE, torch.full(batch.batch_size, life * self.shards + shard))

    def _ask_ahead(self) -> None:
        while len(self._calls) < self.calls_in_flight:
            shard = self._asked % self.shards
            self._calls.append((self._ask(shard), shard, self._served))
            self._asked += 1

    def _ask(self, shard: int) -> Any:
        learned, self._learned[shard] = self._learned[shard], []
        return self._actors[shard].draw.remote(self._batch_size, self.batches_per_call, learned)

    def _receive(self) -> None:
        ref, shard, asked = self._calls.popleft()
        draws = answer(self._ask, shard, sent=ref)
        self._counts[shard] = draws.size, draws.inserted, draws.drawn
        self._drawn.extend((batch, shard, draws.life, asked) for batch in draws.batches)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Read the priorities that a loss wrote into a batch, and send them with the next call."""
        if prioritized_in(self.buffer.sampler) is not None:
            self._hand_back(data, [self.buffer.priority_key, INDEX, "write_generation"], None)

    def write_back(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> None:
        """Send rewritten entries of a batch with the next call, see :meth:`ExperienceBuffer.write_back`."""
        self._hand_back(batch, [*keys, INDEX, "write_position", MASK], list(keys))

    def _hand_back(self, batch: TensorDictBase, entries: list[Any], keys: list[Any] | None) -> None:
        life, shard = divmod(int(batch[SOURCE].flatten()[0]), self.shards)
        shape, _, arrays = packed(batch.select(*entries, strict=False).detach())
        self._learned[shard].append(Learned(life, shape, arrays, keys))

    # -- state -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Take a snapshot if the service runs with a folder; return the location of the newest one, or None."""
        if self.running and self.folder is not None:
            self._settle()
            names = [answer(actor.snapshot.remote, "checkpoint") for actor in self._actors]
            self._resumed = [_of_shard(self.folder, shard) / name for shard, name in enumerate(names)]
        first = self._resumed[0]
        folder = None if first is None else str(first.parents[1])
        return {"folder": folder, "snapshots": [None if each is None else each.name for each in self._resumed]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start from a snapshot in this run's folder, or otherwise in the folder of the run that took it.

        Raises:
            ValueError: The service runs already, or the state is foreign or has another number of shards.
        """
        if self.running:
            raise ValueError("The replay service runs already; load the state before it is used.")
        names = sequence(state_dict.get("snapshots"), "snapshots")
        if len(names) != self.shards:
            raise ValueError(f"The state is that of {len(names)} shards, but here are {self.shards}; take as many.")
        if any(name is None for name in names):
            logger.warning(
                "the checkpoint holds no snapshot of the replay service (it had no folder): it begins empty. Give it "
                "a folder to keep what it holds."
            )
            return
        if not all(isinstance(name, str) and NAME.fullmatch(name) for name in names):
            raise state_error(names, "snapshots", "names of snapshots")
        recorded = Path(str(state_dict.get("folder")))
        for shard, name in enumerate(names):
            here = None if self.folder is None else _of_shard(self.folder, shard) / name
            self._resumed[shard] = here if here is not None and here.is_dir() else _of_shard(recorded, shard) / name

    # -- the service -------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        if self.running:
            return
        self._ray, joined_here = joined(self.ray_init_config)
        self._owns_ray |= joined_here
        names = [f"{self.name}/{shard}" for shard in range(self.shards)]
        there = [self._found(name) for name in names]
        if any(there) and self._found(f"{self.name}/{self.shards}"):
            raise ServiceFault(
                f"The replay service name={self.name!r} has more shards than shards={self.shards}. Take as many as it "
                "was started with."
            )
        if self.join and not all(there):
            raise ServiceFault(f"No replay service name={self.name!r} runs in this cluster to join. Start it first.")
        if any(there) and not (self.keep or self.join):
            raise ServiceFault(
                f"A replay service name={self.name!r} runs in this cluster already. Give another name, or leave it out."
            )
        if self.keep and not self.join:
            self._owner = self._claimed()
        self._actors = [there[shard] or self._built(shard, name) for shard, name in enumerate(names)]
        for actor in self._actors:
            self._check(answer(actor.describe.remote))

    def _built(self, shard: int, name: str) -> Any:
        lifetime = {"lifetime": "detached"} if self.keep else {}
        remote = self._ray.remote(ServiceActor).options(
            name=name, namespace=_NAMESPACE, max_restarts=-1, max_task_retries=0, **lifetime, **self.remote_configs
        )
        folder = None if self.folder is None else str(_of_shard(self.folder, shard))
        begun = self._resumed[shard]
        # Ray stores small arguments with the actor, but larger ones with their sender, which may have exited.
        payload = zlib.compress(cloudpickle.dumps((self.buffer, self._limiter)))
        try:
            return remote.remote(sys.path, payload, shard, folder, None if begun is None else str(begun))
        except ValueError as error:  # another run was faster
            raise ServiceFault(
                f"A replay service name={self.name!r} has just been started by another run. Give another name."
            ) from error

    def _found(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name, namespace=_NAMESPACE)
        except ValueError:
            return None

    def _claimed(self) -> Any:
        """Mark the service as owned by this run, with an actor that ends with it."""
        mark = self._ray.remote(type("ReplayServiceOwner", (), {}))
        try:
            return mark.options(name=f"{self.name}/owner", namespace=_NAMESPACE, num_cpus=0).remote()
        except ValueError as error:
            raise ServiceFault(
                f"Another run has the replay service name={self.name!r}. Wait for its end, or give another name."
            ) from error

    def _check(self, there: dict[str, Any]) -> None:
        here = {"versions": installed(), "buffer": described(self.buffer)}
        for kind in ("versions", "buffer"):
            for what, value in here[kind].items():
                if there[kind].get(what) != value:
                    raise ServiceFault(
                        f"The replay service name={self.name!r} has {what} {there[kind].get(what)!r}, but here is "
                        f"{value!r}. Take the same, or give another name."
                    )
        # Default limits accept the limits of the process that started the service.
        usual = RateLimiter().settings
        for name, value in self._limiter.settings.items():
            known = there.get("limits", usual)[name]
            if value not in (usual[name], known):
                raise ServiceFault(
                    f"The replay service name={self.name!r} has {name}={known}, but here is {value}. Leave it out, "
                    "take the same, or give another name."
                )

    def _settle(self) -> None:
        """Send pending data, so that a snapshot contains it."""
        if self._writer is not None:
            self._writer.settle()
        for shard, learned in enumerate(self._learned):
            if learned:
                self._learned[shard] = []
                answer(self._actors[shard].apply_feedback.remote, learned)

    def shutdown(self) -> None:
        """End the service unless ``keep`` or ``join``, and leave a cluster that was joined here.

        It is safe to call repeatedly.
        """
        actors, self._actors = self._actors, []
        self._calls.clear()
        self._drawn.clear()
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
        raise ValueError(f"A replay service begins with an empty buffer, but this one holds {len(buffer)} rows.")
    if num_envs % shards:
        raise ValueError(f"shards={shards} cannot share {num_envs} environments out evenly; take a divisor.")
    if shards > 1 and not SamplerApi.of(buffer.sampler).supports_uneven_rings:
        raise ValueError(
            f"With shards={shards} each fills some of the rings alone, but {type(buffer.sampler).__name__} wants all "
            "evenly filled; take one of ours, or shards=1."
        )


def _of_shard(folder: Path, shard: int) -> Path:
    return folder / f"shard_{shard}"
