"""The folder of a run: its lock, its record, and the folders of sweeps.

Code belongs here if it creates or protects files of a run. Configs are composed in ``config``.
"""
