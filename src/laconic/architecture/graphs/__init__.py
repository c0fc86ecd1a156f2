"""Who talks to whom in gossip."""
