"""The worker process of the asynchronous collector."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from tensordict import TensorDict
from torch import nn

from torchrl_lightning.collectors._shared import SharedWeights
from torchrl_lightning.collectors.gymnasium import GymnasiumCollector
from torchrl_lightning.collectors.origins import ENV_IDS, TRAJ_IDS


@dataclass(frozen=True)
class WorkerTask:
    """What a worker needs to know when it starts.

    Attributes:
        payload: The pickled environment, policy and keyword arguments of the worker's ``GymnasiumCollector``.
        batches: How many batches this worker collected before the run was resumed.
        worker: The number of this worker.
        num_workers: The number of workers.
        slots: How many rollouts it may have in flight.
        parent: Id of the parent process; the worker ends when it does.
    """

    payload: bytes
    batches: int
    worker: int
    num_workers: int
    slots: int
    parent: int


def run_worker(task: WorkerTask, weights: SharedWeights, connection: Connection) -> None:
    """Collect rollouts into shared memory until the parent closes the connection or asks for the end.

    Messages to the parent: ``("slots", [TensorDict])`` once, then ``("rollout", slot)`` for each rollout, or
    ``("error", text)``. The parent sends the number of a slot that is free again, or ``None`` to end the worker.
    """
    # Ctrl-C reaches the whole process group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _collect(task, weights, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone or has closed the connection
    except BaseException:
        with suppress(OSError):
            connection.send(("error", traceback.format_exc()))
    finally:
        connection.close()


def _collect(task: WorkerTask, weights: SharedWeights, connection: Connection) -> None:
    torch.set_num_threads(1)
    env, policy, kwargs = pickle.loads(task.payload)
    collector = GymnasiumCollector(env, policy, **kwargs)
    # A resumed run uses other seeds and trajectory ids than before the interruption.
    counters = {
        "batches": task.batches,
        "trajectories": task.batches * (collector.frames_per_batch + collector.num_envs),
    }
    collector.load_state_dict({**collector.state_dict(), **counters})
    module = policy if isinstance(policy, nn.Module) else None
    free = list(range(task.slots))
    slots: list[TensorDict] = []
    version, first_env = -1, task.worker * collector.num_envs
    try:
        while True:
            while not free or connection.poll():
                slot = _receive(connection, task.parent)
                if slot is None:
                    return
                free.append(slot)
            version = weights.fetch(module, version)
            rollout = collector.rollout()
            ids = rollout[TRAJ_IDS]
            rollout[TRAJ_IDS] = ids * task.num_workers + task.worker
            rollout[ENV_IDS] = (first_env + torch.arange(collector.num_envs))[:, None].expand_as(ids)
            rollout["collector", "policy_version"] = torch.full_like(ids, version)
            if not slots:
                slots = [rollout.transpose(0, 1).clone().share_memory_() for _ in range(task.slots)]
                connection.send(("slots", [dict(slot.items(True, True)) for slot in slots]))
                if _receive(connection, task.parent) is None:  # wait until the parent has mapped them
                    return
            slot = free.pop(0)
            slots[slot].update_(rollout.transpose(0, 1))
            connection.send(("rollout", slot))
    finally:
        collector.shutdown(raise_on_error=False)


def _receive(connection: Connection, parent: int) -> int | None:
    while not connection.poll(1.0):
        if os.getppid() != parent:
            return None
    message: int | None = connection.recv()
    return message
