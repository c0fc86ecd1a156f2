"""The layout of payloads: shards, chunks, entries, seeds, bits and indices."""
