"""The payloads between ranks that own shards, as rows of bytes."""
