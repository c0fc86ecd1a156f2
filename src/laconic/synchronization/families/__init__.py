"""Base classes of rules that share a form."""
