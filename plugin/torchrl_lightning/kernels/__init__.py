"""Compiled kernels and the trees and scans over them: one way to compile, no data of a buffer."""
