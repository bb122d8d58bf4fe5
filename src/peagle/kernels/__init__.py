"""Fast functions, one each, with the PyTorch definition beside it."""
