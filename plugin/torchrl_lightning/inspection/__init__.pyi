"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .report import Inspection as Inspection
from .report import inspect_buffer as inspect_buffer
