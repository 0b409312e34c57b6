"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .annealing import DemonstrationAnnealing as DemonstrationAnnealing
from .demo_sampler import DemonstrationSampler as DemonstrationSampler
from .demo_storage import DemonstrationStorage as DemonstrationStorage
from .demo_writer import DemonstrationWriter as DemonstrationWriter
from .io.demo_dataset import fill as fill
from .io.demo_dataset import read_dataset as read_dataset
from .io.demo_dataset import transitions as transitions
from .io.demo_dataset import write_dataset as write_dataset
from .io.directory import DemonstrationDirectory as DemonstrationDirectory
from .io.keyboard import play_demonstrations as play_demonstrations
from .io.minari import minari_demonstrations as minari_demonstrations
from .io.recording import record_demonstrations as record_demonstrations
from .io.safetensors_files import read_demonstration as read_demonstration
from .io.safetensors_files import write_demonstration as write_demonstration
from .miner import DemonstrationMiner as DemonstrationMiner
from .ppod import PPODBuffer as PPODBuffer
from .replay.actor import DemonstrationActor as DemonstrationActor
from .replay.collector_replay import DemonstrationReplay as DemonstrationReplay
from .replay.transform import DemonstrationReplayTransform as DemonstrationReplayTransform
from .trajectory import Demonstration as Demonstration
