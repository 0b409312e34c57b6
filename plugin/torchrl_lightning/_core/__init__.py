"""Helpers without reinforcement learning: files, states, settings, errors, memory and processes.

Code belongs here if several packages use it and it knows no buffer, environment or agent. The few private names of
other libraries are in ``torchrl_compat``.
"""
