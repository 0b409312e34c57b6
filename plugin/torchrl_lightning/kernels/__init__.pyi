"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .scan import discounted_scan as discounted_scan
from .segment_tree import MaxSegmentTree as MaxSegmentTree
from .segment_tree import MinSegmentTree as MinSegmentTree
from .segment_tree import SegmentTree as SegmentTree
from .segment_tree import SumSegmentTree as SumSegmentTree
