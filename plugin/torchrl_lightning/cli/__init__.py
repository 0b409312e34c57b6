"""Console commands, one file for each command.

Modules import torch only when a command runs, so that ``--help`` and TAB completion stay fast. Composing and validating
configs is in ``config``, and everything that reads or writes the folder of a run is in ``run_folder``.
"""
