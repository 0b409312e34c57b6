"""Environments in worker processes, and the limits on the time of a call.

Code belongs here if it starts, watches or ends processes and threads of environments.
"""
