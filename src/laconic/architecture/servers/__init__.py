"""The common parts of architectures with servers: the server of each bucket, and how a bucket is summed there."""
