"""What every Hydra application needs from this package: config folders, typed schemas and both Hydra versions.

These modules import no torch, because Hydra loads them in every application. The command line is in ``cli``.
"""
