"""Measured figures of others that the simulator is held to."""
