"""What a run did: files that people and scripts read. Knows no Megatron."""
