"""Helpers without reinforcement learning: files, states, settings, errors, memory and processes.

Several packages use this code, and it does not depend on buffers, environments or agents. The few private names of
other libraries are in ``torchrl_compat``.
"""
