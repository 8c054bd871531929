"""MEMO and Megatron: the only package that imports megatron."""
