"""Offsets in one arena for the memory requests of a training step, solved ahead of time. Knows neither torch nor Megatron."""
