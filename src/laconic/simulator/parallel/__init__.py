"""Training steps of large transformers under every kind of parallelism: plans, traffic, memory, time, search."""
