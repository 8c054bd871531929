"""A transformer layer as token tiles: token-local segments around one global attention. Knows torch, not Megatron."""
