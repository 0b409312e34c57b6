"""Run sweeps and searches: one failed job does not end the others, and each run of a search knows its trial.

Code belongs here if it handles several jobs of one command. The folders of sweeps are created in ``run_folder``.
"""
