"""Vector environments of Gymnasium, EnvPool and TorchRL behind one interface.

Code belongs here if it steps several copies of an environment. Wrappers of one environment are in ``wrappers``.
"""
