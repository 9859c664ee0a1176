"""What callers see: operations on PyTorch tensors, which check, pick a configuration and launch."""
