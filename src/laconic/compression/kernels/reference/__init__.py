"""Kernels in plain torch, for every device; faster ones must agree with them."""
