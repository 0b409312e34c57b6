"""Start runs on several ranks, by the command or by a script with its own Trainer, and send them signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kit.processes import environment, members, survivors

COMMAND = Path(sys.executable).parent / "torchrl-lightning-train"
SETTINGS = [
    *("seed=0", "data.reset_at_each_batch=true"),
    *("data.eval_episodes=2", "trainer.check_val_every_n_epoch=2", "eval_episodes=2", "model.schedule=constant"),
    *("trainer.enable_progress_bar=false", "logger=many", "callbacks=checkpoint", "eval_checkpoint=last"),
]
ON_POLICY = [
    *("experiment=ppo_cartpole", "data.num_envs=2", "data.frames_per_batch=32", "data.num_epochs=1"),
    *("data.num_mini_batch=2", "data.mini_batch_size=null", "data.updates_per_step=1"),
]
_REPLAY = [
    *("data.num_envs=1", "data.frames_per_batch=8", "data.frames_per_update=1", "data.warmup_frames=32"),
    *("data.updates_per_epoch=16", "data.updates_per_step=4", "data.batch_size=8"),
    *("data.buffer.storage.max_size=512", "data.checkpoint_buffer=inside"),
]
REPLAY = ["experiment=dqn_cartpole", *_REPLAY]
SAC = ["experiment=sac_pendulum", *_REPLAY]
# DDP changes the order of the gradients after its first step, and the rounding of a sum of three depends on the order.
STRATEGIES = {2: "ddp", 3: "ddp_find_unused_parameters_true"}
FAMILIES = {"PPO": ON_POLICY, "DQN": REPLAY, "SAC": SAC}

_SCRIPT = """
import sys

import lightning as L

from torchrl_lightning import ExperienceBuffer, LastCheckpoint, OnPolicyDataModule, ReplayDataModule, RingStorage
from torchrl_lightning.agents import DQNModule, MLPNetwork, PPOModule, SACModule

family, ranks, strategy, folder, frames, resumed = sys.argv[1:]
shared = {"seed": 0, "reset_at_each_batch": True, "eval_episodes": 2, "total_frames": int(frames)}
replay = {**shared, "num_envs": 1, "frames_per_batch": 8, "frames_per_update": 1, "warmup_frames": 32, "batch_size": 8}
replay |= {"updates_per_epoch": 16, "updates_per_step": 4, "checkpoint_buffer": "inside"}
replay["buffer"] = lambda num_envs: ExperienceBuffer(storage=RingStorage(512), num_envs=num_envs)
L.seed_everything(0)
network = MLPNetwork([16], "relu")
if family == "PPO":
    module, data = PPOModule(network), OnPolicyDataModule(
        "CartPole-v1", num_envs=2, frames_per_batch=32, num_epochs=1, mini_batch_size=16, **shared
    )
elif family == "DQN":
    module, data = DQNModule(network, epsilon_frames=100), ReplayDataModule("CartPole-v1", **replay)
else:
    module, data = SACModule(network), ReplayDataModule("Pendulum-v1", **replay)
trainer = L.Trainer(
    accelerator="cpu", strategy=strategy, devices=int(ranks), max_epochs=-1, logger=False, enable_progress_bar=False,
    check_val_every_n_epoch=2, num_sanity_val_steps=0, enable_model_summary=False, default_root_dir=folder,
    callbacks=[LastCheckpoint(folder + "/checkpoints")],
)
trainer.fit(module, datamodule=data, ckpt_path=resumed or None)
"""


class RankRun:
    """A run on several ranks in its own session."""

    def __init__(self, folder: Path, arguments: Sequence[str | Path], run: Path, ranks: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._ranks, self.last = folder, ranks, run / "checkpoints" / "last.ckpt"
        self._file = (folder / "said").open("w")
        self._process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=environment(),
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @classmethod
    def of_command(cls, folder: Path, *settings: str, ranks: int = 2) -> RankRun:
        """Start a run of the command."""
        into = folder / "run"
        several = [f"trainer.devices={ranks}", f"trainer.strategy={STRATEGIES[ranks]}"]
        return cls(folder, [COMMAND, *SETTINGS, *several, *settings, f"hydra.run.dir={into}"], into, ranks)

    @classmethod
    def of_trainer(cls, folder: Path, family: str, frames: int, resumed: Path | str = "", ranks: int = 2) -> RankRun:
        """Start a script with its own Trainer."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "script.py").write_text(_SCRIPT)
        arguments = [family, str(ranks), STRATEGIES[ranks], str(folder / "run"), str(frames), str(resumed)]
        return cls(folder, [sys.executable, folder / "script.py", *arguments], folder / "run", ranks)

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait until a condition is true; fail if the run ends first."""
        deadline = time.monotonic() + 300
        while not is_true():
            assert self._process.poll() is None, self.lines()
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.02)

    def wait_for_checkpoint(self) -> None:
        """Wait for the first checkpoint."""
        self.wait_until(self.last.exists)

    def pids(self) -> list[int]:
        """Return the process ids of the started ranks, by rank."""
        found = {0: self._process.pid}
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for child in children:
            try:
                said = Path(f"/proc/{child}/cmdline").read_bytes() + Path(f"/proc/{child}/environ").read_bytes()
            except OSError:
                continue
            for rank in range(1, self._ranks):
                if f"LOCAL_RANK={rank}\0".encode() in said:
                    found[rank] = int(child)
        return [found[rank] for rank in sorted(found)]

    def send(self, number: int, ranks: Sequence[int]) -> None:
        """Send a signal to some ranks."""
        pids = self.pids()
        for rank in ranks:
            os.kill(pids[rank], number)

    def ended(self) -> bool:
        """Return whether the first rank has ended."""
        return self._process.poll() is not None

    def status(self, seconds: float = 300) -> int:
        """Wait for the end of the first rank; return its status."""
        return self._process.wait(seconds)

    def lines(self) -> list[str]:
        """Return the printed lines without log messages and warnings of libraries.

        The resource tracker of a killed process warns at any time, also after our last line.
        """
        said = (self.folder / "said").read_text().splitlines()
        others = ("[INFO]", "warn(", "UserWarning: resource_tracker")
        return [line for line in said if line.strip() and not any(other in line for other in others)]

    def left(self, seconds: float = 30) -> list[int]:
        """Return the ids of processes that still run some seconds after the first rank's end."""
        return survivors(self._process.pid, seconds)

    def kill(self) -> None:
        """Kill all processes of the run."""
        for pid in members(self._process.pid):
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._file.close()


def weights(checkpoint: Path) -> list[float]:
    """Return all weights of a checkpoint."""
    values = torch.load(checkpoint, weights_only=True)["state_dict"].values()
    return torch.cat([value.flatten().double() for value in values]).tolist()


def frames_of(checkpoint: Path) -> set[int]:
    """Return the frame counts of the ranks in a checkpoint."""
    stored = torch.load(checkpoint, weights_only=True)
    data = next(value for name, value in stored.items() if name.endswith("DataModule"))
    return {rank["frames"] for rank in data["ranks"]}
