"""Parameter servers: what they do, how they are started, and how workers talk to them."""
