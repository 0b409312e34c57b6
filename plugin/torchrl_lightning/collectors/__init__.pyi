"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .asynchronous import AsynchronousCollector as AsynchronousCollector
from .episodes import play_episodes as play_episodes
from .gymnasium import GymnasiumCollector as GymnasiumCollector
from .torchrl_collector import TorchRLCollector as TorchRLCollector
