"""Sources of replay batches other than one buffer: data sets, mixtures of buffers, and model-generated branches.

A source serves batches to ``ReplayDataModule``. It never steps environments.
"""
