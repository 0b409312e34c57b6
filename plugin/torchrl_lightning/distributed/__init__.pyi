"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.distributed.cluster import ClusterFault as ClusterFault
from torchrl_lightning.distributed.cluster import ServiceFault as ServiceFault
from torchrl_lightning.distributed.ray_collector import RayCollector as RayCollector
from torchrl_lightning.distributed.service import ReplayService as ReplayService
