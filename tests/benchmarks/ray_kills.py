"""Kill each kind of process of runs on a Ray cluster and compare the results with the promises of the guide.

    python tests/benchmarks/ray_kills.py [--kills 60] [--seed 0] [--seconds S] [--cases NAME ...]

The script sends SIGKILL to collectors, to shards of a replay service, and to learners. The signal comes during their
start, the collection of rollouts, or the draws of batches. Each round starts the processes of one case on a cluster of
this machine, sends up to four signals, and then reads all rows.

| case | processes |
| --- | --- |
| collectors | two collectors and a learner |
| folder | the same, and a replay service of two shards with a folder |
| no folder | the same with one shard without a folder, which starts empty after its death |
| limited | a rate-limited service with a folder, collectors of one learner, and a second learner that only draws |
| learner | the processes of "folder"; the learner gets the signal and is started again with its last state |
| ranks | two ranks of the command; one gets the signal, and the command is resumed |

Each row contains the number of its environment object and its step in this object. This detects lost, repeated and torn
rows. The learners log each rollout and each message with its time. A silence of more than 70 seconds is an error, and
so is a process that outlives its round. Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import itertools
import json
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
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # a loaded machine needs more time
    warnings.simplefilter("ignore")

import ray
from benchmarks.ray_numbered import COLLECTORS, ENVS, LIMITS, STEPS
from benchmarks.ray_soak import parent

SILENCE = 70.0  # seconds between two lines of a learner; the warning comes after 60
ACTORS = {"collector": "RolloutActor", "service": "ServiceActor"}
TARGETS = {
    "collectors": ["collector"],
    "folder": ["collector", "service"],
    "no folder": ["collector", "service"],
    "limited": ["collector", "service", "learner"],
    "learner": ["learner"],
    "ranks": ["rank"],
}
SYSTEM = {
    "agent_register_timeout_ms": 300_000,  # a loaded machine needs more time
    "worker_niceness": 0,  # Ray's default lets any other process delay the actors by minutes
    "preload_python_modules": [f"torchrl_lightning.ray.{name}" for name in ("_actor", "_service_actor")],
}
MOMENTS = ("start", "collection", "update", "any")


def actors(kind: str) -> list[int]:
    """Return the process ids of the actors in the cluster of this process."""
    return [pid for pid, name in workers() if name.startswith(f"ray::{ACTORS[kind]}")]


def workers() -> Iterator[tuple[int, str]]:
    """Yield the ids and names of the worker processes in the cluster of this process."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name = path.read_bytes().decode(errors="replace")
            if name.startswith("ray::") and parent(parent(path.parent.name)) == os.getpid():
                yield int(path.parent.name), name
        except (OSError, IndexError):
            pass


def wait_until(condition: Callable[[], Any], seconds: float = 180.0) -> Any:
    """Return the first true value of a function; raise TimeoutError if it remains false too long."""
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
        command = [
            sys.executable,
            str(Path(__file__).with_name("ray_numbered.py")),
            role,
            self.case,
            str(self.folder),
            self.address,
        ]
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
        """Send SIGKILL at the given moment."""
        if kind == "learner":
            process = self.second if self.case == "limited" else self.learner
            assert process is not None
            self._wait_for_moment(moment, coin, lambda: [process.pid])
            process.kill()
            process.wait()
            if self.case == "learner":
                self.check_nothing_left()
                if not (self.folder / "state").exists():  # a new run does not accept the folder of another run
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
        """Wait until each collector has delivered three more rollouts."""
        begun = time.time()

        def is_back() -> bool:
            self.check_alive()
            later = [note for note in self.notes() if note["event"] == "rollout" and note["time"] > begun]
            counts = Counter(note["rows"][0][1] for note in later)
            return len(counts) == COLLECTORS and min(counts.values()) >= 3

        wait_until(is_back, 300.0)

    def end(self) -> None:
        """Stop the learners and wait until they end."""
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
        """Wait until all actors have ended."""
        wait_until(lambda: not any(actors(kind) for kind in ACTORS), 60.0)

    def stop(self) -> None:
        """Kill the processes that remain after an error."""
        for process in filter(None, (self.learner, self.second)):
            process.kill()
            process.wait()
        for kind in ACTORS:
            for pid in actors(kind):
                os.kill(pid, signal.SIGKILL)

    def faults(self) -> list[str]:
        """Return the differences of the log and the stored rows from the promises of the guide."""
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
    kills, started = Counter[str](), [process]
    try:
        wait_until(lambda: last.exists() or process.poll() is not None, 300.0)
        time.sleep(coin.uniform(0.0, 5.0))
        if process.poll() is not None:
            return Counter(), ["the run ended before a signal: " + log.read_text().splitlines()[-1]]
        begun, targets = time.monotonic(), [pid for pid in of_group(process) if is_rank(pid)]
        os.kill(coin.choice(targets), signal.SIGKILL)
        kills["rank, any"] += 1
        wait_until(lambda: process.poll() is not None and not of_group(process), SILENCE)
        say(f"ranks: all ended {time.monotonic() - begun:.0f} s after the signal, status {process.returncode}")
        wait_until(lambda: not any(actors(kind) for kind in ACTORS), 60.0)
        lines = len(log.read_text().splitlines())
        resumed = start(f"ckpt_path={last}", "trusted=true")
        started.append(resumed)
        size = last.stat().st_mtime
        wait_until(lambda: last.stat().st_mtime > size or resumed.poll() is not None, 300.0)
        if resumed.poll():
            faults.append("the resumed run ended: " + " / ".join(log.read_text().splitlines()[lines:][-3:]))
    except TimeoutError as error:
        faults.append(f"{error}: {log.read_text()[-400:]}")
    finally:
        for one in started:
            for pid in of_group(one):
                os.kill(pid, signal.SIGKILL)
            one.wait()
        wait_until(lambda: not any(actors(kind) for kind in ACTORS))  # the next round kills only its own actors
    return kills, faults


def main() -> None:
    """Send signals in rounds and print the result of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--cases", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    arguments = parser.parse_args()
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
