"""MEMO for Megatron: very long sequences on the GPUs you have.

Importing this package changes nothing: :func:`enable` does, explicitly.
"""

__version__ = "0.1.0"


def enable(args):
    """Installs MEMO's hooks into the Megatron that is imported, as ``args`` (parsed, with the --memo flags) says.

    With neither ``--memo`` nor ``--memo-cpu`` nothing is installed and None is returned.
    Raises UnsupportedError, SeamError or ConfigError, in which case nothing has been installed.
    """
    from .runtime import enable as enable_runtime

    return enable_runtime(args)
