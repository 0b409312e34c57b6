"""Learner process for ``ray_kills.py``. Each row contains its environment number and step."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread

if __name__ == "__main__":
    one_thread(pin=False)
    warnings.simplefilter("ignore")

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import ray
from torchrl_lightning import ExperienceBuffer, PrioritizedSampler, RayCollector, ReplayService, RingStorage

COLLECTORS, ENVS, STEPS, BATCH = 2, 2, 8, 16
LIMITS: dict[str, Any] = {"samples_per_insert": 4.0, "error_buffer": 2000.0, "min_size": 64}


class NumberedEnv(gymnasium.Env[Any, Any]):
    """Environment that observes its own number and its number of steps. The number of steps is also the reward."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.number, self.steps, self.left = float(random.SystemRandom().getrandbits(40)), 0, 0

    def _observe(self) -> Any:
        return np.array([self.number, self.steps])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 12))
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        reward, self.steps, self.left = float(self.steps), self.steps + 1, self.left - 1
        return self._observe(), reward, self.left == 0, False, {}


class Notes(logging.Handler):
    """Write a line with the time for each event and each logged message."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._file = path.open("a", buffering=1)

    def note(self, event: str, **details: Any) -> None:
        self._file.write(json.dumps({"time": time.time(), "event": event, **details}) + "\n")

    def emit(self, record: logging.LogRecord) -> None:
        self.note("logged", text=record.getMessage())


def make_service(case: str, folder: Path, address: str, **settings: Any) -> ReplayService:
    """Return the service of a case."""
    buffer = ExperienceBuffer(
        storage=RingStorage(COLLECTORS * ENVS * 50_000), sampler=PrioritizedSampler(), num_envs=COLLECTORS * ENVS
    )
    settings |= LIMITS if case == "limited" else {}
    return ReplayService(
        buffer,
        name=folder.name,
        shards=2 if case in ("folder", "learner") else 1,
        folder=None if case == "no folder" else folder / "service",
        batches_per_call=2,
        unacknowledged=4,
        ray_init_config={"address": address, "log_to_driver": False, "logging_level": "error"},
        **settings,
    )


def learn(case: str, folder: Path, address: str) -> None:
    """Collect, draw and save the state until the file ``stop`` exists; then store all rows of the service."""
    notes = Notes(folder / "notes.jsonl")
    logging.getLogger("torchrl_lightning").addHandler(notes)
    notes.note("begins", pid=os.getpid())
    service = None if case == "collectors" else make_service(case, folder, address)
    collector = RayCollector(
        NumberedEnv,
        num_collectors=COLLECTORS,
        num_envs=ENVS,
        frames_per_batch=ENVS * STEPS,
        seed=0,
        ray_init_config={"address": address, "log_to_driver": False, "logging_level": "error"},
        service=service,
    )
    state = folder / "state"
    if state.exists():
        saved = pickle.loads(state.read_bytes())
        collector.load_state_dict(saved["collector"])
        if service is not None:
            service.load_state_dict(saved["service"])
    numbers: dict[int, int] = {}
    stopping, rollouts = False, 0
    while not stopping:
        stopping = (folder / "stop").exists()
        (folder / "phase").write_text("collection")
        batch = collector.rollout()
        rollouts += 1
        envs = batch["collector", "env_ids"][:, 0].tolist()
        if "observation" in batch:  # the first rollout of an actor, or a rollout without a service
            numbers |= dict(zip(envs, batch["observation"][:, 0, 0].long().tolist(), strict=True))
        rows = batch["next", "reward"][..., 0].long()
        ids = batch["collector", "traj_ids"].reshape(ENVS, STEPS)
        notes.note(
            "rollout",
            rows=[
                [numbers[env], env, steps, of] for env, steps, of in zip(envs, rows.tolist(), ids.tolist(), strict=True)
            ],
            deaths=collector.deaths,
            lost=collector.lost_frames,
        )
        (folder / "phase").write_text("update")
        if service is not None and case != "limited" and rollouts > 2 * COLLECTORS:
            draw(service, notes)
        time.sleep(0.02)
        if rollouts % 25 == 0:
            saved = {"collector": collector.state_dict(), "service": service and service.state_dict()}
            (folder / "part").write_bytes(pickle.dumps(saved))
            (folder / "part").replace(state)
            notes.note("saved")
    if service is not None:
        for actor in collector._actors:
            ray.get(actor.__ray_call__.remote(lambda actor: actor._writer.wait_until_written()))
        shards = [ray.get(actor.__ray_call__.remote(all_rows)) for actor in service._actors]
        (folder / "rows").write_bytes(pickle.dumps([shard for shard in shards if shard is not None]))
        (folder / "status").write_text(json.dumps([ray.get(actor.status.remote()) for actor in service._actors]))
    alive = {numbers[env] for env in numbers}
    collector.shutdown()
    if service is not None:
        service.shutdown()
    notes.note("ends", alive=sorted(alive))


def draw(service: ReplayService, notes: Notes) -> None:
    """Draw a batch, update its priorities, and log the number of its torn rows."""
    batch = service.draw(BATCH)
    before, after, reward = batch["observation"], batch["next", "observation"], batch["next", "reward"]
    torn = (before[:, 0] != after[:, 0]) | (before[:, 1] + 1 != after[:, 1]) | (before[:, 1] != reward[:, 0])
    batch["td_error"] = torch.rand(BATCH)
    service.update_tensordict_priority(batch)
    notes.note("draw", torn=int(torn.sum()))


def draw_only(folder: Path, address: str) -> None:
    """Draw from a running service until the file ``stop`` exists."""
    notes = Notes(folder / "drawn.jsonl")
    logging.getLogger("torchrl_lightning").addHandler(notes)
    ray.init(address=address, log_to_driver=False, logging_level="error")
    service = make_service("limited", folder, address, join=True)
    while not (folder / "stop").exists():
        draw(service, notes)


def all_rows(actor: Any) -> dict[str, Any] | None:
    buffer = actor._buffer
    if not len(buffer):
        return None
    rows = buffer.storage.get(buffer.writer.rings.filled_cells())
    return {"before": rows["observation"].numpy(), "after": rows["next", "observation"].numpy()}


if __name__ == "__main__":
    role, case, folder, address = sys.argv[1:]
    learn(case, Path(folder), address) if role == "learn" else draw_only(Path(folder), address)
