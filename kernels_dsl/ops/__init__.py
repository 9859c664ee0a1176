"""The operations that callers see: on PyTorch tensors, which check, pick a configuration and launch."""
