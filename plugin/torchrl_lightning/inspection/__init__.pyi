"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.inspection.report import Inspection as Inspection
from torchrl_lightning.inspection.report import inspect_buffer as inspect_buffer
