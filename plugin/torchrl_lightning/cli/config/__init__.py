"""Compose, validate and instantiate the config of a command, and resume the config of an earlier run.

Code belongs here if it reads or changes a config. Folders and locks of runs are in ``run_folder``.
"""
