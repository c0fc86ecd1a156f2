"""The parts of a sum over datagrams that do not involve sockets: how values lie in rows, and how much may be lost."""
