"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.kernels.scan import discounted_scan as discounted_scan
from torchrl_lightning.kernels.segment_tree import MaxSegmentTree as MaxSegmentTree
from torchrl_lightning.kernels.segment_tree import MinSegmentTree as MinSegmentTree
from torchrl_lightning.kernels.segment_tree import SegmentTree as SegmentTree
from torchrl_lightning.kernels.segment_tree import SumSegmentTree as SumSegmentTree
