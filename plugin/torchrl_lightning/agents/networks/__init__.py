"""Networks of agents: encoders, heads, actors, critics, target networks and exploration.

Nothing here knows a loss, an optimizer or Lightning.
"""
