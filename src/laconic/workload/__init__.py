"""A training job as data: its layers, their tensors, and how long each takes to compute."""
