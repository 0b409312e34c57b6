"""Do runs over a Ray cluster survive the death of each of their processes as the guide promises?

    python tests/benchmarks/ray_kills.py [--kills 60] [--seed 0] [--seconds S] [--cases NAME ...]

SIGKILL is sent to collectors, to shards of a replay service, and to learners: during their start, while rollouts are
collected, and while batches are drawn. Each round starts the processes of one case on a cluster of this machine, sends
up to four signals, and then reads all rows.

| case | processes |
| --- | --- |
| collectors | two collectors, and a learner |
| folder | the same, and a replay service of two shards with a folder |
| no folder | the same with one shard without a folder, which begins empty after its death |
| limited | a rate-limited service with a folder, collectors of one learner, and a second learner that draws |
| learner | the processes of "folder"; the learner gets the signal and is started again with its last state |
| ranks | two ranks of the command; one gets the signal, and the command is resumed |

Each row has the number of its environment object and its step there, so lost, repeated and torn rows are found. The
learners note each rollout and each logged line with its time: a longer silence than 60 seconds is an error, and so is a
process that is left at the end of a round. Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say

if __name__ == "__main__":
    one_thread(pin=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # for a machine with other work
    warnings.simplefilter("ignore")

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import ray
from benchmarks.ray_soak import parent
from torchrl_lightning import ExperienceBuffer, PrioritizedSampler, RayCollector, ReplayService, RingStorage

COLLECTORS, ENVS, STEPS, BATCH = 2, 2, 8, 16
SILENCE = 70.0  # seconds between two lines of a learner; the warning comes after 60
LIMITS: dict[str, Any] = {"samples_per_insert": 4.0, "error_buffer": 2000.0, "min_size": 64}
ACTORS = {"collector": "RolloutActor", "service": "ServiceActor"}
TARGETS = {
    "collectors": ["collector"],
    "folder": ["collector", "service"],
    "no folder": ["collector", "service"],
    "limited": ["collector", "service", "learner"],
    "learner": ["learner"],
    "ranks": ["rank"],
}
SYSTEM = {  # for a machine with other work
    "agent_register_timeout_ms": 300_000,
    "preload_python_modules": [f"torchrl_lightning.ray.{name}" for name in ("_actor", "_service_actor")],
}
MOMENTS = ("start", "collection", "update", "any")


class NumberedEnv(gymnasium.Env[Any, Any]):
    """Observes its own number and the number of its steps, which is also the reward."""

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


# ---------------------------------------------------------------------- a learner, in a process of its own


class Notes(logging.Handler):
    """Write a line for each event and each logged message, with the time."""

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
    """Draw a batch, set its priorities, and note the number of its torn rows."""
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


# ---------------------------------------------------------------------- the process that sends the signals


def actors(kind: str) -> list[int]:
    """Return the processes of the actors of this process's cluster."""
    return [pid for pid, name in workers() if name.startswith(f"ray::{ACTORS[kind]}")]


def workers() -> Iterator[tuple[int, str]]:
    """Yield the worker processes of this process's cluster, with their names."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name = path.read_bytes().decode(errors="replace")
            if name.startswith("ray::") and parent(parent(path.parent.name)) == os.getpid():
                yield int(path.parent.name), name
        except (OSError, IndexError):
            pass


def wait_until(condition: Callable[[], Any], seconds: float = 180.0) -> Any:
    """Return the first true value of a function; raise an error if there is no such value in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true within {seconds:g} s")
        time.sleep(0.05)
    return value


class Round:
    """The processes of one case."""

    def __init__(self, case: str, folder: Path, address: str) -> None:
        self.case, self.folder, self.address = case, folder, address
        folder.mkdir()
        self.kills: Counter[str] = Counter()
        self.learner = self._start("learn")
        self.second = self._start("draw") if case == "limited" else None

    def _start(self, role: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "--role", role, self.case, str(self.folder), self.address]
        log = (self.folder / f"{role}.log").open("ab")
        return subprocess.Popen(command, stdout=log, stderr=log)

    def notes(self, name: str = "notes.jsonl") -> list[dict[str, Any]]:
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def count(self, event: str) -> int:
        return sum(note["event"] == event for note in self.notes())

    def check_alive(self) -> bool:
        if self.learner.poll() is not None:
            text = (self.folder / "learn.log").read_text().strip()
            raise RuntimeError(f"the learner ended with status {self.learner.returncode}: {text[-600:]}")
        return True

    def kill(self, kind: str, moment: str, coin: random.Random) -> None:
        """Send SIGKILL at a moment."""
        if kind == "learner":
            process = self.second if self.case == "limited" else self.learner
            assert process is not None
            self._wait_for_moment(moment, coin, lambda: [process.pid])
            process.kill()
            process.wait()
            if self.case == "learner":
                self.check_nothing_left()
                if not (self.folder / "state").exists():  # a new run, which refuses the folder of another run
                    shutil.rmtree(self.folder / "service", ignore_errors=True)
                self.learner = self._start("learn")
            else:
                time.sleep(coin.uniform(0.0, 5.0))
                self.second = self._start("draw")
        else:
            pids = self._wait_for_moment(moment, coin, lambda: self.check_alive() and actors(kind))
            try:
                os.kill(coin.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                return
        self.kills[f"{kind}, {moment}"] += 1

    def _wait_for_moment(self, moment: str, coin: random.Random, find: Callable[[], Any]) -> list[int]:
        found = wait_until(find)
        if moment == "start":
            time.sleep(coin.uniform(0.0, 2.0))
        elif moment == "any":
            time.sleep(coin.uniform(0.0, 4.0))
        else:
            phase = self.folder / "phase"
            wait_until(lambda: phase.exists() and self.count("rollout") > 4 * COLLECTORS)
            time.sleep(coin.uniform(0.0, 1.0))
            wait_until(lambda: phase.read_text() == moment)
        return find() or wait_until(find) if moment != "start" else found

    def wait_for_recovery(self) -> None:
        """Wait until each collector has delivered several rollouts since now."""
        begun = time.time()

        def is_back() -> bool:
            self.check_alive()
            later = [note for note in self.notes() if note["event"] == "rollout" and note["time"] > begun]
            counts = Counter(note["rows"][0][1] for note in later)
            return len(counts) == COLLECTORS and min(counts.values()) >= 3

        wait_until(is_back, 300.0)

    def end(self) -> None:
        """Stop the learners, and wait for their ends."""
        (self.folder / "stop").touch()
        for process in filter(None, (self.learner, self.second)):
            try:
                process.wait(150)
            except subprocess.TimeoutExpired:
                process.kill()
                raise RuntimeError("a learner did not end") from None
        if self.learner.returncode:
            raise RuntimeError((self.folder / "learn.log").read_text()[-600:])
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        """Wait until no actor is left."""
        wait_until(lambda: not any(actors(kind) for kind in ACTORS), 60.0)

    def stop(self) -> None:
        """End the processes that an error has left."""
        for process in filter(None, (self.learner, self.second)):
            process.kill()
            process.wait()
        for kind in ACTORS:
            for pid in actors(kind):
                os.kill(pid, signal.SIGKILL)

    def faults(self) -> list[str]:
        """Compare the notes and the stored rows with the guide."""
        notes = self.notes()
        return [
            *self._check_times(notes, "learner"),
            *(self._check_times(self.notes("drawn.jsonl"), "second learner") if self.second else []),
            *self._check_delivered(notes),
            *(self._check_stored(notes) if self.case != "collectors" else []),
        ]

    def _check_times(self, notes: list[dict[str, Any]], name: str) -> Iterator[str]:
        times = [note["time"] for note in notes]
        silence = max((after - before for before, after in itertools.pairwise(times)), default=0.0)
        if silence > SILENCE:
            yield f"the {name} was silent for {silence:.0f} s"
        if torn := sum(note.get("torn", 0) for note in notes):
            yield f"{torn} torn rows were drawn"

    def _delivered(self, notes: list[dict[str, Any]]) -> dict[int, list[int]]:
        rows: dict[int, list[int]] = defaultdict(list)
        for note in notes:
            for number, _, steps, _ in note.get("rows", []):
                rows[number].extend(steps)
        return rows

    def _check_delivered(self, notes: list[dict[str, Any]]) -> Iterator[str]:
        for number, steps in self._delivered(notes).items():
            if steps != list(range(len(steps))):
                yield f"the delivered steps of environment {number} are not 0, 1, ...: {steps[:3]}...{steps[-3:]}"
        owners: dict[int, set[int]] = defaultdict(set)
        for note in notes:
            for number, _, _, ids in note.get("rows", []):
                for trajectory in ids:
                    owners[trajectory].add(number)
        if self.case != "learner" and (shared := [key for key, value in owners.items() if len(value) > 1]):
            yield f"trajectory ids were given twice: {shared[:5]}"
        killed = sum(count for name, count in self.kills.items() if name.startswith("collector"))
        last = [note for note in notes if note["event"] == "rollout"][-1]
        if self.case != "learner" and last["deaths"] != killed:
            yield f"{killed} collectors were killed, {last['deaths']} deaths were counted"
        if last["lost"] > killed * ENVS * STEPS:
            yield f"{last['lost']} frames were lost, {killed} kills may lose {killed * ENVS * STEPS}"

    def _check_stored(self, notes: list[dict[str, Any]]) -> Iterator[str]:
        alive, delivered = set(notes[-1]["alive"]), self._delivered(notes)
        stored: dict[int, list[int]] = defaultdict(list)
        for shard in pickle.loads((self.folder / "rows").read_bytes()):
            if (shard["before"] + [0, 1] != shard["after"]).any():
                yield "torn rows are stored"
            for number, step in shard["before"].astype(int).tolist():
                stored[number].append(step)
        for number, steps in stored.items():
            if len(set(steps)) < len(steps):
                yield f"environment {number} has repeated rows"
            first = 0 if self.case != "no folder" else min(steps)
            if sorted(steps) != list(range(first, first + len(steps))):
                yield f"environment {number} has gaps: {len(steps)} rows from {min(steps)} to {max(steps)}"
        for number in alive:
            missing = len(set(delivered[number]) - set(stored[number]))
            if missing and self.case != "no folder":
                yield f"environment {number} of a running collector lacks {missing} of {len(delivered[number])} rows"
            if self.case == "no folder" and delivered[number] and delivered[number][-1] not in stored[number]:
                yield f"environment {number} of a running collector has not stored its last row"
        if self.case == "limited":
            for _, inserted, drawn in json.loads((self.folder / "status").read_text()):
                surplus = LIMITS["samples_per_insert"] * (inserted - LIMITS["min_size"]) - drawn
                if abs(surplus) > LIMITS["error_buffer"]:
                    yield f"the ratio differs by {surplus:.0f} draws"


def ranks(folder: Path, address: str, coin: random.Random) -> tuple[Counter[str], list[str]]:
    """Send SIGKILL to one of two ranks of the command, and resume the command."""
    folder.mkdir()
    command = [
        str(Path(sys.executable).with_name("torchrl-lightning-train")),
        *("experiment=apex_cartpole", "trainer.devices=2", "trainer.strategy=ddp", "~callbacks.progress_bar"),
        *(f"+data.collector.ray_init_config.address={address}", f"+data.source.ray_init_config.address={address}"),
        *("data.collector.num_collectors=2", "data.num_envs=4", "data.updates_per_epoch=100"),
    ]  # fmt: skip
    faults: list[str] = []
    run, log = folder / "run", folder / "log"

    def start(*more: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            arguments = [*command, f"hydra.run.dir={run}", *more]
            return subprocess.Popen(arguments, stdout=output, stderr=output, cwd=folder, start_new_session=True)

    def of_group(process: subprocess.Popen[bytes]) -> list[int]:
        pids = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(path.read_text().rpartition(")")[2].split()[3]) == process.pid:
                    pids.append(int(path.parent.name))
            except (OSError, IndexError):
                pass
        return pids

    def is_rank(pid: int) -> bool:
        return b"experiment=apex_cartpole" in Path(f"/proc/{pid}/cmdline").read_bytes()

    process, last = start("data.total_frames=1000000"), run / "checkpoints" / "last.ckpt"
    try:
        wait_until(lambda: last.exists() or process.poll() is not None, 300.0)
        time.sleep(coin.uniform(0.0, 5.0))
        if process.poll() is not None:
            return Counter(), ["the run ended before a signal: " + log.read_text().splitlines()[-1]]
        begun, targets = time.monotonic(), [pid for pid in of_group(process) if is_rank(pid)]
        os.kill(coin.choice(targets), signal.SIGKILL)
        wait_until(lambda: process.poll() is not None and not of_group(process), SILENCE)
        say(f"ranks: all ended {time.monotonic() - begun:.0f} s after the signal, status {process.returncode}")
        wait_until(lambda: not any(actors(kind) for kind in ACTORS), 60.0)
        lines = len(log.read_text().splitlines())
        resumed = start(f"ckpt_path={last}", "trusted=true")
        size = last.stat().st_mtime
        wait_until(lambda: last.stat().st_mtime > size or resumed.poll() is not None, 300.0)
        if resumed.poll():
            faults.append("the resumed run ended: " + " / ".join(log.read_text().splitlines()[lines:][-3:]))
        os.killpg(resumed.pid, signal.SIGKILL)
        resumed.wait()
    except TimeoutError as error:
        faults.append(f"{error}: {log.read_text()[-400:]}")
    finally:
        for pid in of_group(process):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    return Counter({"rank, any": 1}), faults


def main() -> None:
    """Send signals round by round, and print what each case has shown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--cases", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--role", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        role, case, folder, address = arguments.role
        learn(case, Path(folder), address) if role == "learn" else draw_only(Path(folder), address)
        return
    coin, began = random.Random(arguments.seed), time.monotonic()
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=2**28,
        logging_level="error",
        log_to_driver=False,
        _system_config=SYSTEM,
    )
    address, counts, faults = ray.get_runtime_context().gcs_address, Counter[str](), list[str]()
    home = Path(tempfile.mkdtemp(prefix="ray_kills"))
    number = 0
    while sum(counts.values()) < arguments.kills and time.monotonic() - began < arguments.seconds:
        case = arguments.cases[number % len(arguments.cases)]
        folder, number = home / f"round_{number}", number + 1
        if case == "ranks":
            killed, wrong = ranks(folder, address, coin)
        else:
            processes = Round(case, folder, address)
            try:
                moments = coin.sample(MOMENTS, k=min(len(MOMENTS), arguments.kills - sum(counts.values())))
                for moment in sorted(moments, key=lambda moment: moment != "start"):
                    processes.kill(coin.choice(TARGETS[case]), moment, coin)
                    processes.wait_for_recovery()
                processes.end()
                wrong = processes.faults()
            except (RuntimeError, TimeoutError) as error:
                wrong = [f"{type(error).__name__}: {error}"]
            finally:
                processes.stop()
            killed = processes.kills
        counts.update({f"{case} | {name}": count for name, count in killed.items()})
        faults += [f"{folder}, {case}: {fault}" for fault in wrong]
        say(f"{case}: {dict(killed)}, {len(wrong)} faults; {time.monotonic() - began:.0f} s")
        for fault in wrong:
            say(f"  {fault}")
    pids = [pid for pid, _ in workers()]
    ray.shutdown()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60.0)
    say("| case | killed, at | kills |\n| --- | --- | --- |")
    for name, count in sorted(counts.items()):
        say(f"| {name} | {count} |")
    say(f"{sum(counts.values())} kills, {len(faults)} faults; the notes are in {home}")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
