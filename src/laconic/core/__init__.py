"""The contracts that all packages share: payloads, transports, plans, events and state; no algorithms."""
