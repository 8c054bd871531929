"""Error types. Every message says which object, what was expected and found (in numbers and units), and what to do next."""


class MemoError(RuntimeError):
    """Base of all errors that megatron_memo raises on purpose."""


class ConfigError(MemoError, ValueError):
    """A flag or value of ours is out of range or contradicts another one."""


class UnsupportedError(MemoError):
    """The job uses a Megatron feature that --memo does not support. The message names the flag and what to use instead."""


class SeamError(MemoError):
    """The installed Megatron does not look as a hook expects it. Nothing has been installed when this is raised."""


class HostMemoryError(MemoError):
    """Host memory for swapped activations is too small or cannot be pinned."""


class AttentionError(MemoError):
    """The attention backend of this run disagrees with a reference in higher precision."""


class SelfCheckError(MemoError):
    """The tiled layer disagrees with the stock layer of the installed Megatron."""
