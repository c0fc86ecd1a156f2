"""Means of the rows that arrive: ranks send rows to their owners over UDP, and owners send the means to all ranks.

frames       the layout of a datagram; many are written and checked at a time
partial_sum  one exchange on one rank: which rows are there, their sum, which means have come
deadline     how long an owner waits, given the durations of recent exchanges
ledger       how much may be lost, given how much was lost before
retries      when to ask a peer again
pace         how fast to send, given the share that was lost
peers        the thread of a rank that sends and receives frames
group        the object that the session opens, waits for and closes
"""
