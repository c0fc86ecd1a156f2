"""From a strategy to a graph of tasks: for every hooks of the runtime, how its steps look on a virtual clock."""
