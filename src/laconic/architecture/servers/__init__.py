"""What architectures with servers share: where buckets are kept, and how one is summed there."""
