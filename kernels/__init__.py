"""Fused operators and counter-based random numbers. Each file: plain PyTorch, and a kernel where one pays."""
