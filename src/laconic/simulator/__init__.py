"""Runs a Strategy on a virtual clock: the very plan that the runtime executes, over a workload and a cluster as data."""
