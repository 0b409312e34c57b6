"""Support for every Hydra application: config folders, typed schemas, and wrappers for Hydra 1.3 and 1.4.

These modules do not import torch, because Hydra loads them in every application. The command line is in ``cli``.
"""
