"""What a killed worker costs under laconic, under torchrun's restarts, and under torchft."""
