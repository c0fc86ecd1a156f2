"""Sums formed on the way."""
