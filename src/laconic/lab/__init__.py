"""Virtual hosts and shaped links on one machine."""
