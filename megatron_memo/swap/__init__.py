"""Activations to the host and back: host memory, queues, executor. Knows torch, not Megatron."""
