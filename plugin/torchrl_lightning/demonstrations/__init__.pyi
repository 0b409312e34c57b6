"""The exported names. This list is the only one: ``_lazy`` and type checkers read it."""

from .actor import DemonstrationActor as DemonstrationActor
from .annealing import DemonstrationAnnealing as DemonstrationAnnealing
from .dataset import fill as fill
from .dataset import read_dataset as read_dataset
from .dataset import transitions as transitions
from .dataset import write_dataset as write_dataset
from .directory import DemonstrationDirectory as DemonstrationDirectory
from .files import read_demonstration as read_demonstration
from .files import write_demonstration as write_demonstration
from .keyboard import play_demonstrations as play_demonstrations
from .minari import minari_demonstrations as minari_demonstrations
from .miner import DemonstrationMiner as DemonstrationMiner
from .ppod import PPODBuffer as PPODBuffer
from .recording import record_demonstrations as record_demonstrations
from .replay import DemonstrationReplay as DemonstrationReplay
from .replay_transform import DemonstrationReplayTransform as DemonstrationReplayTransform
from .sampler import DemonstrationSampler as DemonstrationSampler
from .storage import DemonstrationStorage as DemonstrationStorage
from .trajectory import Demonstration as Demonstration
from .writer import DemonstrationWriter as DemonstrationWriter
