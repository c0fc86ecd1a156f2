"""Hosts, links and topologies as data."""

from laconic.cluster.topology import Cluster, Link, parse_bandwidth

__all__ = ["Cluster", "Link", "parse_bandwidth"]
