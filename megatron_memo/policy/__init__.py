"""What is kept, swapped or recomputed. Pure: no torch, no Megatron."""
