"""Gymnasium wrappers of one environment.

A wrapper changes observations of one environment. Observation statistics are in ``normalization``, because several
environments share them.
"""
