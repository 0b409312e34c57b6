"""Replay demonstrations step by step in collectors and in TorchRL environments.

Code belongs here if it feeds demonstrated steps to an environment. Files are read in ``io``.
"""
