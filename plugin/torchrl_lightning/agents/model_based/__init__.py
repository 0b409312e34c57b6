"""World models, planners that search in them, and the agents that learn with them.

The buffers of model-based training are in ``dynamics``, and the DataModule is in ``datamodules``.
"""
