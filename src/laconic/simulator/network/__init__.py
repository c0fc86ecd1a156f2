"""The cost of a move on the network: from formulas and measured tables, or flow by flow."""

from laconic.simulator.network.contract import LINK, Network, Passage

__all__ = ["LINK", "Network", "Passage"]
