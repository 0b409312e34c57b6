"""Parts of a run that several DataModules share: collection, evaluation, normalisation, loaders and checks.

Only DataModules use the code of this package. The code does not import DataModules.
"""
