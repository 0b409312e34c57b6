"""Demonstrations: trajectories that are kept, ranked, and replayed in place of an environment's own episodes."""

from torchrl_lightning.demonstrations.actor import DemonstrationActor
from torchrl_lightning.demonstrations.annealing import DemonstrationAnnealing
from torchrl_lightning.demonstrations.directory import DemonstrationDirectory
from torchrl_lightning.demonstrations.files import read_demonstration, write_demonstration
from torchrl_lightning.demonstrations.keyboard import play_demonstrations
from torchrl_lightning.demonstrations.minari import minari_demonstrations
from torchrl_lightning.demonstrations.miner import DemonstrationMiner
from torchrl_lightning.demonstrations.ppod import PPODBuffer
from torchrl_lightning.demonstrations.recording import record_demonstrations
from torchrl_lightning.demonstrations.replay import DemonstrationReplay
from torchrl_lightning.demonstrations.replay_transform import DemonstrationReplayTransform
from torchrl_lightning.demonstrations.sampler import DemonstrationSampler
from torchrl_lightning.demonstrations.storage import DemonstrationStorage
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.demonstrations.writer import DemonstrationWriter

__all__ = [
    "Demonstration",
    "DemonstrationActor",
    "DemonstrationAnnealing",
    "DemonstrationDirectory",
    "DemonstrationMiner",
    "DemonstrationReplay",
    "DemonstrationReplayTransform",
    "DemonstrationSampler",
    "DemonstrationStorage",
    "DemonstrationWriter",
    "PPODBuffer",
    "minari_demonstrations",
    "play_demonstrations",
    "read_demonstration",
    "record_demonstrations",
    "write_demonstration",
]
