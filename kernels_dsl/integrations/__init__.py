"""Operations of the library behind interfaces of other packages: PyTorch's and transformers' registries."""
