"""How payloads are laid out: shards, chunks, seeds, packed bits and indices."""
