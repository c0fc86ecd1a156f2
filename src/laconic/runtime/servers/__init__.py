"""Parameter servers: their work, their start, and how workers communicate with them."""
