"""Kernels for GPUs, written in Triton; modules here need it."""
