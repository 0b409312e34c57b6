"""Parts of a run that several DataModules share: collection, evaluation, normalisation, loaders and checks.

Code belongs here if only DataModules use it. It does not import them.
"""
