"""Hooks in PyTorch that pass gradients or parameters to the engine and write the results back."""
