"""Sums formed on the network path: a pool of slots adds up frames of integers that ranks send over UDP.

frames         what a datagram holds, written and checked many at a time
slot_pool      the slots: which frames have arrived, their sum, and frames that were sent twice
aggregator     the thread of a server that owns a pool
shared_scale   floating-point values as integers on a scale that all ranks share
window         which frames a rank may send, and which it must retransmit
worker         the thread of a rank that sends frames and receives sums
"""
