"""From a strategy to a graph of tasks: for every seam of the runtime, how its steps look on a virtual clock."""
