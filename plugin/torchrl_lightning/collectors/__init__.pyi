"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.collectors.asynchronous import AsynchronousCollector as AsynchronousCollector
from torchrl_lightning.collectors.episodes import play_episodes as play_episodes
from torchrl_lightning.collectors.gymnasium import GymnasiumCollector as GymnasiumCollector
from torchrl_lightning.collectors.torchrl_collector import TorchRLCollector as TorchRLCollector
