"""Replay demonstrations step by step in collectors and in TorchRL environments.

Code belongs here if it replaces an environment's steps by demonstrated steps. Files are read in ``io``.
"""
