"""Core attention by other kernels than Megatron's own, and the comparison of any kernel with a reference. Knows torch, not Megatron."""
