"""How payloads are laid out: shards, chunks, entries, seeds, bits and indices."""
