"""The contracts that all packages share: payloads, transports, plans, events and state. It holds no algorithm."""
