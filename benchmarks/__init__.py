"""Side-by-side measurements against PyTorch and other libraries; not part of the package."""
