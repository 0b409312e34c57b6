"""Networks of agents: encoders, heads, actors, critics, target networks and exploration.

These modules do not depend on losses, optimizers or Lightning.
"""
