"""From a strategy to a graph of tasks: for each kind of hooks in the runtime, the tasks of its steps."""
