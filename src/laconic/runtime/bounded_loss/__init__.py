"""Means of what arrives: ranks send rows to their owners over UDP, and owners send everybody the means.

frames       what a datagram holds, written and checked many at a time
partial_sum  one exchange on one rank: which rows are there, their sum, which means have come
deadline     how long an owner waits, from what recent exchanges have taken
ledger       how much may be lost, from how much was
retries      when to ask a peer again
pace         how fast to send, from what was lost
peers        the thread of a rank that sends and takes frames
group        what the session opens, waits for and closes
"""
