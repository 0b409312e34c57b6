"""Read the metrics of runs, and draw learning curves and sweeps.

This package does not import torch. Pages about buffers are in ``inspection``.
"""
