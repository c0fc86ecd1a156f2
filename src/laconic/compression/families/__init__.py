"""Base classes of methods that share a form: quantizers and sparsifiers."""
