"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.demonstrations.actor import DemonstrationActor as DemonstrationActor
from torchrl_lightning.demonstrations.annealing import DemonstrationAnnealing as DemonstrationAnnealing
from torchrl_lightning.demonstrations.dataset import fill as fill
from torchrl_lightning.demonstrations.dataset import read_dataset as read_dataset
from torchrl_lightning.demonstrations.dataset import transitions as transitions
from torchrl_lightning.demonstrations.directory import DemonstrationDirectory as DemonstrationDirectory
from torchrl_lightning.demonstrations.files import read_demonstration as read_demonstration
from torchrl_lightning.demonstrations.files import write_demonstration as write_demonstration
from torchrl_lightning.demonstrations.keyboard import play_demonstrations as play_demonstrations
from torchrl_lightning.demonstrations.minari import minari_demonstrations as minari_demonstrations
from torchrl_lightning.demonstrations.miner import DemonstrationMiner as DemonstrationMiner
from torchrl_lightning.demonstrations.ppod import PPODBuffer as PPODBuffer
from torchrl_lightning.demonstrations.recording import record_demonstrations as record_demonstrations
from torchrl_lightning.demonstrations.replay import DemonstrationReplay as DemonstrationReplay
from torchrl_lightning.demonstrations.replay_transform import (
    DemonstrationReplayTransform as DemonstrationReplayTransform,
)
from torchrl_lightning.demonstrations.sampler import DemonstrationSampler as DemonstrationSampler
from torchrl_lightning.demonstrations.storage import DemonstrationStorage as DemonstrationStorage
from torchrl_lightning.demonstrations.trajectory import Demonstration as Demonstration
from torchrl_lightning.demonstrations.writer import DemonstrationWriter as DemonstrationWriter
