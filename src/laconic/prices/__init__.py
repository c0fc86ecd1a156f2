"""Costs besides moving bytes: encoding and decoding by device, the sums of servers, memory.

The package lies below runtime and simulator, so that planning and training use the same figures.
"""
