"""The graphs of neighbours in gossip."""
