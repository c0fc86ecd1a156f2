"""The places where PyTorch lets us in. Hooks hand gradients or parameters to the engine and put the result back."""
