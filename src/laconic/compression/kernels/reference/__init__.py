"""Kernels in plain torch, for every device: what faster ones must agree with."""
