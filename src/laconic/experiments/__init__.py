"""The embedded tasks and the runs that compare strategies on them."""
