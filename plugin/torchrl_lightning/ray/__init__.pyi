"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .cluster import ClusterFault as ClusterFault
from .cluster import ServiceFault as ServiceFault
from .ray_collector import RayCollector as RayCollector
from .service import ReplayService as ReplayService
