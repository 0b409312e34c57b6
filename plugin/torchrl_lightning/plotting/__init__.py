"""Read the metrics of runs, and draw learning curves and sweeps.

Nothing here imports torch. Pages about buffers are in ``inspection``.
"""
