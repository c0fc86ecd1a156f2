"""Membership when ranks die, join and leave: numbered views, decided by one process, each with a process group."""
