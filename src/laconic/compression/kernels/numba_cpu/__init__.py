"""Kernels for CPUs, compiled by numba when first called and kept on disk; modules here need numba."""
