"""`python -m benchmarks.elastic`: ranks of real jobs are killed at random moments, and what is left is checked."""
