"""Kill actors and remove machines in a run on a Ray cluster. The run must reach its score and count each frame once.

    python tests/benchmarks/ray_soak.py [--kills 60] [--removed 5] [--frames 7000000] [--json soak.json]

The run has the settings of ``vtrace_cartpole`` and three collectors on a cluster of local nodes. Enough nodes remain
for all collectors. A kill sends SIGKILL to a random actor after the last killed one has been replaced. Kills and node
removals are spread evenly over the frames of the run.

The report contains the delivered and the counted frames, the trajectory numbers, the score of the best checkpoint over
20 episodes, and the number of remaining actors. Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say

if __name__ == "__main__":
    one_thread(pin=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    warnings.simplefilter("ignore")

import lightning as L
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from ray.cluster_utils import Cluster
from tensordict import TensorDict

from torchrl_lightning import RayCollector
from torchrl_lightning._core.keys import TRAJ_IDS
from torchrl_lightning._hydra.paths import CONF_DIR

COLLECTORS, NODES = 3, 2
PATIENCE = 30.0  # seconds: then the next actor is killed even if the last one was not replaced


class NotingCollector(RayCollector):
    """Count the delivered frames and record the order of the trajectories of each environment."""

    delivered = 0
    trajectories: dict[int, list[int]] = {}  # one collector in this process
    misplaced = 0

    def rollout(self) -> TensorDict:
        """Return the next rollout after recording its frames and trajectories."""
        batch = super().rollout()
        self.delivered += batch.numel()
        starts, ids = batch["is_init"][..., 0], batch[TRAJ_IDS].reshape(batch.shape)
        for row, env in enumerate(batch["collector", "env_ids"][:, 0].tolist()):
            seen = self.trajectories.setdefault(env, [])
            for is_start, number in zip(starts[row].tolist(), ids[row].tolist(), strict=True):
                if is_start != (not seen or seen[-1] != number):
                    self.misplaced += 1
                if is_start:
                    seen.append(number)
        return batch


def parent(process: int | str) -> int:
    """Return the parent process."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def actors(of: int | None = None) -> list[int]:
    """Return the actor processes of this machine, or only of the clusters that process ``of`` started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        name = path.parent.name
        try:
            if path.read_bytes().startswith(b"ray::RolloutActor") and of in (None, parent(parent(name))):
                found.append(int(name))
        except OSError:
            pass
    return found


def disturb(
    data: Any,
    kept: list[NotingCollector],
    cluster: Any,
    kills: int,
    removed: int,
    done: threading.Event,
    counts: Counter[str],
) -> None:
    """Kill actors and remove nodes at fixed numbers of frames; add the events to ``counts``."""
    draw = random.Random(0)
    at = [(data.total_frames * (i + 1) // (kills + 1), "kill") for i in range(kills)]
    at += [(data.total_frames * (i + 1) // (removed + 1), "remove") for i in range(removed)]
    nodes = list(cluster.worker_nodes)
    for frames, what in sorted(at):
        while data.frames < frames and not done.is_set():
            time.sleep(0.1)
        if what == "remove":
            cluster.remove_node(nodes.pop(draw.randrange(len(nodes))), allow_graceful=False)
            counts["removed"] += 1
            continue
        while not (alive := actors(os.getpid())) and not done.is_set():
            time.sleep(0.1)
        if alive and not done.is_set():
            back, waits = kept[0].restarts, time.monotonic() + PATIENCE
            os.kill(draw.choice(alive), signal.SIGKILL)
            counts["killed"] += 1
            while kept[0].restarts == back and time.monotonic() < waits and not done.is_set():
                time.sleep(0.1)


def run(kills: int, removed: int, frames: int) -> dict[str, Any]:
    """Train during the kills and removals, and return the results."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 2**27})
    for _ in range(NODES + removed):  # all nodes are added here: the thread that removes nodes cannot add nodes
        cluster.add_node(num_cpus=2, object_store_memory=2**27)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        settings = [f"data.total_frames={frames}", f"data.num_envs={8 * COLLECTORS}", "seed=0"]
        cfg = compose("train", ["experiment=vtrace_cartpole", "collector=ray", *settings])
    cfg.data.collector = None
    kept: list[NotingCollector] = []

    def collector(policy: Any, seed: int, num_envs: int, frames_per_batch: int, num_collectors: int) -> Any:
        sizes = {"num_collectors": num_collectors, "num_envs": num_envs, "frames_per_batch": frames_per_batch}
        options = {"seed": seed, "ray_init_config": {"address": cluster.address, "log_to_driver": False}}
        kept.append(NotingCollector("CartPole-v1", policy, **sizes, **options))
        return kept[-1]

    data = instantiate(cfg.data, collector=partial(collector, num_collectors=COLLECTORS))
    model = instantiate(cfg.model)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    folder = tempfile.TemporaryDirectory()
    best = ModelCheckpoint(folder.name, monitor="eval/return", mode="max")
    trainer = L.Trainer(max_epochs=-1, accelerator="cpu", check_val_every_n_epoch=40, callbacks=[best], **quiet)
    done, began = threading.Event(), time.monotonic()
    counts: Counter[str] = Counter()
    killer = threading.Thread(target=disturb, args=(data, kept, cluster, kills, removed, done, counts), daemon=True)
    killer.start()
    try:
        trainer.fit(model, datamodule=data)
    finally:
        done.set()
        killer.join(60)
    (noted,) = kept
    every = [number for numbers in noted.trajectories.values() for number in numbers]
    model.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
    returns = data.evaluate(model.policy, 20)["episode_return"]
    time.sleep(2.0)
    found = {
        "seconds": round(time.monotonic() - began),
        "actors killed": counts["killed"],
        "nodes removed": counts["removed"],
        "frames counted": data.frames,
        "frames delivered": noted.delivered,
        "trajectories": len(every),
        "numbers given twice": len(every) - len(set(every)),
        "rows that do not follow": noted.misplaced,
        "deaths": noted.deaths,
        "replaced": noted.restarts,
        "frames lost": noted.lost_frames,
        "score": float(returns.mean()),
        "actors left": len(actors()),
    }
    cluster.shutdown()
    return found


def main() -> None:
    """Print one line per result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--removed", type=int, default=5)
    parser.add_argument("--frames", type=int, default=7_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run(options.kills, options.removed, options.frames)
    for name, value in found.items():
        say(f"{name}: {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
