"""Train with several learners on a Ray cluster. The collectors are actors of the same cluster.

Needs ``pip install 'torchrl-lightning[ray]' 'ray[train]'``. Without ``--address`` it starts a local cluster.

Run: python examples/ray_learners.py --learners 2 --collectors 4 --frames 100000
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import ray.train
import torch
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer

import ray
from torchrl_lightning import (
    LastCheckpoint,
    OnPolicyDataModule,
    RayCollector,
    RolloutMetricsLogger,
    VTraceBuffer,
    VTraceModule,
)


def learn(options: dict[str, Any]) -> None:
    """Run one learner. Ranks, seeds, collectors and checkpoints work as without Ray."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    folder = Path(options["folder"], "checkpoints")
    data = OnPolicyDataModule(
        "CartPole-v1",
        buffer=VTraceBuffer,  # V-trace corrects for rollouts of an older policy
        collector=partial(RayCollector, num_collectors=options["collectors"]),  # total over all learners
        num_envs=8 * options["collectors"],
        frames_per_batch=256,  # per collector
        total_frames=options["frames"],
        num_epochs=1,
        num_mini_batch=1,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices="auto",  # one device per learner
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        max_epochs=-1,
        check_val_every_n_epoch=20,  # each validation also writes a checkpoint
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RolloutMetricsLogger(), LastCheckpoint(folder)],
    )
    last = folder / "last.ckpt"  # all learners share it; a restarted run continues from it
    module = VTraceModule(learning_rate=0.002, schedule="linear")
    prepare_trainer(trainer).fit(module, datamodule=data, ckpt_path=last if last.exists() else None)
    score = data.evaluate(module.policy, episodes=20)["episode_return"].mean().item()
    kept = ray.train.Checkpoint.from_directory(folder) if trainer.is_global_zero else None  # part of the result of Ray
    ray.train.report({"return": score, "frames": data.frames}, checkpoint=kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--collectors", type=int, default=4, help="a multiple of the learners")
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, default=Path("ray_learners"), help="on storage that all machines have")
    parser.add_argument("--address", help="of a cluster; without it one is started here")
    options = parser.parse_args()
    if options.address:
        ray.init(address=options.address)
    else:
        ray.init(address="local", num_cpus=options.learners + options.collectors)
    folder = options.folder.resolve()
    trainer = TorchTrainer(
        learn,
        train_loop_config={"collectors": options.collectors, "frames": options.frames, "folder": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=options.learners),
        run_config=ray.train.RunConfig(
            storage_path=str(folder),
            failure_config=ray.train.FailureConfig(max_failures=3),  # then all resume from the checkpoint
        ),
    )
    metrics = trainer.fit().metrics
    ray.shutdown()
    print(f"mean return of 20 episodes: {metrics['return']:.1f} ({metrics['frames']} frames)")


if __name__ == "__main__":
    main()
