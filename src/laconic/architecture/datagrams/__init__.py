"""What a sum over datagrams needs that has nothing to do with sockets: how values lie in rows, and what may be lost."""
