"""Kill the writers, learners and shard of a replay service and check for lost, repeated and torn rows.

    python tests/benchmarks/service_soak.py [--kills 30] [--seconds 120] [--json soak.json]

Three writers send rollouts of 4 environments x 16 steps. Two learners draw batches of 256 with priorities. All of them
are actors of a local cluster. SIGKILL goes to one of the six processes at a time, chosen at random. The script checks
``samples_per_insert`` during the whole run. At the end it reads each row: the row must be intact and in its place in
the ring, and each acknowledged row must be stored. Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say

if __name__ == "__main__":
    one_thread(pin=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    warnings.simplefilter("ignore")

import numpy as np
import torch

import ray
from torchrl_lightning import ExperienceBuffer, PrioritizedSampler, ReplayService, RingStorage

WRITERS, LEARNERS, ENVS, STEPS, BATCH, WIDTH = 3, 2, 4, 16, 256, 16
RATIO, BOUND, CALL = 4.0, 12_000.0, 8
NAME = "soak"


def service(folder: str | None = None, **settings: Any) -> ReplayService:
    """Return a handle of the service."""
    storage = RingStorage(WRITERS * ENVS * 100_000)
    buffer = ExperienceBuffer(storage=storage, sampler=PrioritizedSampler(), num_envs=WRITERS * ENVS)
    limits: dict[str, Any] = {"samples_per_insert": RATIO, "error_buffer": BOUND, "min_size": 4096}
    return ReplayService(
        buffer, name=NAME, folder=folder, batches_per_call=CALL, unacknowledged=32, **limits, **settings
    )


def content(env: Any, step: Any) -> Any:
    """Return the expected content of a row, to detect torn rows."""
    return (env * 1_000_003.0 + step)[..., None] + np.arange(WIDTH)


@ray.remote(num_cpus=0)
class Writer:
    """Write numbered steps of its environments, starting at step ``first``."""

    def __init__(self, number: int, first: int) -> None:
        self.number, self.step = number, first
        self.first = first
        self.writer = service(join=True).writer(f"writer {number}")

    def pid(self) -> int:
        return os.getpid()

    def write(self, count: int) -> tuple[int, range]:
        """Write rollouts; return the next step and the range of this writer's acknowledged steps."""
        ids = [self.number * ENVS + env for env in range(ENVS)]
        for _ in range(count):
            steps = np.arange(self.step, self.step + STEPS)
            env, step = np.meshgrid(ids, steps)
            rows = {"env": env, "step": step, "x": content(env.astype(float), step)}
            flags = np.zeros((STEPS, ENVS, 1), bool)
            rows |= {("next", name): flags for name in ("done", "terminated", "truncated")}  # type: ignore[dict-item]
            self.writer.write(rows, ids)
            self.step += STEPS
        kept = self.writer._writers[0]._unacknowledged
        acknowledged = (kept[0][0] if kept else self.writer._writers[0]._num_sent) * STEPS
        return self.step, range(self.first, self.first + acknowledged)


@ray.remote(num_cpus=0)
class Learner:
    """Draw batches, check their rows and update their priorities."""

    def __init__(self) -> None:
        self.service = service(join=True)

    def pid(self) -> int:
        return os.getpid()

    def learn(self, count: int) -> tuple[int, int]:
        """Draw batches; return the number of batches and of torn rows."""
        torn = 0
        for _ in range(count):
            batch = self.service.draw(BATCH)
            expected = content(batch["env"].numpy().astype(float), batch["step"].numpy())
            torn += int((batch["x"].numpy() != expected).any(-1).sum())
            batch["td_error"] = torch.rand(BATCH)
            self.service.update_tensordict_priority(batch)
        return count, torn


def main() -> None:
    """Run, kill, count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    coin, folder = random.Random(args.seed), tempfile.mkdtemp(prefix="soak")
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
    owner = service(folder)
    owner.writer("nobody")
    shard = owner._actors[0]
    written = [0] * WRITERS
    kept = [dict[int, range]() for _ in range(WRITERS)]  # acknowledged steps by writer and session
    writers = [Writer.remote(number, 0) for number in range(WRITERS)]
    learners = [Learner.remote() for _ in range(LEARNERS)]
    work: dict[Any, tuple[str, int]] = {}
    sessions = [0] * WRITERS
    killed = dict.fromkeys(("writer", "learner", "service"), 0)
    batches = torn = 0
    worst = 0.0

    def go(kind: str, number: int) -> None:
        actor = (writers if kind == "writer" else learners)[number]
        work[actor.write.remote(4) if kind == "writer" else actor.learn.remote(CALL)] = kind, number

    for number in range(WRITERS):
        go("writer", number)
    for number in range(LEARNERS):
        go("learner", number)
    began, due = time.monotonic(), [args.seconds * (n + 0.5) / max(args.kills, 1) for n in range(args.kills)]
    looked = began
    while (now := time.monotonic() - began) < args.seconds or due:
        if due and now >= due[0]:
            due.pop(0)
            kind = coin.choice(["service", *["writer"] * 2, *["learner"] * 2])
            targets = {"writer": writers, "learner": learners, "service": [shard]}[kind]
            try:
                ask = coin.choice(targets)
                pid = ask.__ray_call__.remote(lambda _: os.getpid()) if kind == "service" else ask.pid.remote()
                os.kill(ray.get(pid, timeout=20), signal.SIGKILL)
                killed[kind] += 1
            except (ray.exceptions.RayError, ProcessLookupError):
                due.insert(0, now + 1.0)  # the process is restarting
        ready, _ = ray.wait(list(work), timeout=0.2)
        for ref in ready:
            kind, number = work.pop(ref)
            try:
                result = ray.get(ref)
            except ray.exceptions.RayActorError:  # the next writer starts after all steps that this one may have sent
                if kind == "writer":
                    sessions[number] += 1
                    written[number] += 1_000 * STEPS
                    writers[number] = Writer.remote(number, written[number])
                else:
                    learners[number] = Learner.remote()
            else:
                if kind == "writer":
                    written[number], kept[number][sessions[number]] = result
                else:
                    batches, torn = batches + result[0], torn + result[1]
            go(kind, number)
        if time.monotonic() - looked > 0.5:
            looked = time.monotonic()
            try:
                _, inserted, drawn = ray.get(shard.status.remote(), timeout=20)
                if inserted >= 4096:
                    worst = max(worst, abs(RATIO * (inserted - 4096) - drawn))
            except ray.exceptions.RayError:
                pass
    seconds = time.monotonic() - began
    for number, writer in enumerate(writers):
        with contextlib.suppress(ray.exceptions.RayActorError):  # then its last report counts
            _, kept[number][sessions[number]] = ray.get(writer.write.remote(0), timeout=60)
    rows = ray.get(shard.__ray_call__.remote(_all_rows), timeout=120)
    wrong = twice = lost = 0
    for env in range(WRITERS * ENVS):
        own = rows["env"] == env
        steps, x = rows["step"][own], rows["x"][own]
        wrong += int((x != content(np.full(len(steps), float(env)), steps)).any(-1).sum())
        twice += len(steps) - len(np.unique(steps)) + int((np.diff(steps) <= 0).sum())
        there = set(steps.tolist())
        lost += sum(step not in there for safe in kept[env // ENVS].values() for step in safe)
    total = len(rows["env"])
    say(f"kills {killed}, {seconds:.0f} s: {total} rows held, {batches} batches, {batches / seconds:.0f} batches/s")
    say(f"torn {torn + wrong}, twice or out of order {twice}, acknowledged and lost {lost}; ratio off by {worst:.0f}")
    if args.json:
        args.json.write_text(json.dumps({"killed": killed, "rows": total, "torn": torn + wrong, "lost": lost}))
    owner.shutdown()
    ray.shutdown()
    if torn or wrong or twice or lost or worst > BOUND:
        raise SystemExit(1)


def _all_rows(service: Any) -> dict[str, Any]:
    buffer = service._buffer
    cells = buffer.writer.rings.filled_cells()
    rows = buffer.storage.get(cells)
    return {name: rows[name].numpy() for name in ("env", "step", "x")}


if __name__ == "__main__":
    main()
