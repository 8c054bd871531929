"""The command-line flags, each spelled once. Needs neither torch nor Megatron."""

from __future__ import annotations

import argparse
from typing import Any, Sequence

from .config import ATTENTION_CHOICES, MemoConfig
from .errors import ConfigError

# Flag destinations and the MemoConfig field that each one fills.
_FIELDS = {
    "memo": "enabled",
    "memo_alpha": "alpha",
    "memo_tiles": "tiles",
    "memo_keep": "keep",
    "memo_keep_layers": "keep_layers",
    "memo_host_gib": "host_gib",
    "memo_attention": "attention",
    "memo_cpu": "cpu",
    "memo_report": "report_dir",
    "memo_allow_untested": "allow_untested",
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the --memo flags to ``parser`` and returns it: fits Megatron's ``extra_args_provider``."""
    default = MemoConfig()
    group = parser.add_argument_group(title="memo")
    group.add_argument("--memo", action="store_true", help="Train with token-wise swapping and recomputation of activations.")
    group.add_argument(
        "--memo-alpha", type=float, default=default.alpha, metavar="A",
        help=f"Fraction of tokens (0 to 1) whose skeletal activations are swapped to host memory; the rest is recomputed. Default {default.alpha:g}.",
    )
    group.add_argument(
        "--memo-tiles", type=int, default=default.tiles, metavar="T",
        help=f"Token tiles a layer. More tiles need less transient GPU memory. Default {default.tiles}.",
    )
    group.add_argument(
        "--memo-keep", type=float, default=default.keep, metavar="K",
        help=f"Fraction of tokens (0 to 1) whose skeletal activations stay on the GPU. Default {default.keep:g}.",
    )
    group.add_argument(
        "--memo-keep-layers", type=int, default=default.keep_layers, metavar="N",
        help="The last N layers copy nothing to the host: layer input and attention output stay on the GPU "
        f"(recomputed tiles are still recomputed). Default {default.keep_layers}.",
    )
    group.add_argument("--memo-host-gib", type=float, default=None, metavar="G", help="Host memory of each rank for swapped activations, GiB.")
    group.add_argument(
        "--memo-attention", choices=ATTENTION_CHOICES, default=default.attention,
        help="Core attention: Megatron's own (host), FlashAttention-4 called directly (fa4), or torch's scaled_dot_product_attention (sdpa).",
    )
    group.add_argument("--memo-cpu", action="store_true", help="Train with no GPU. Alone: stock Megatron on the CPU.")
    group.add_argument("--memo-report", default=None, metavar="DIR", help="Write DIR/report.rankN.json.")
    group.add_argument(
        "--memo-allow-untested", action="store_true",
        help="Train also with what is built but has not been shown right on its own kernels. The self-check before the first step still decides.",
    )
    return parser


def config_from_args(args: Any) -> MemoConfig:
    """The MemoConfig of a parsed namespace. Missing attributes mean their defaults. Raises ConfigError."""
    config = MemoConfig(**{field: getattr(args, dest) for dest, field in _FIELDS.items() if hasattr(args, dest)})
    plain = MemoConfig(enabled=config.enabled, cpu=config.cpu)
    if not config.enabled and config != plain:
        given = [f"--{dest.replace('_', '-')}" for dest, field in _FIELDS.items() if getattr(config, field) != getattr(plain, field)]
        raise ConfigError(f"{', '.join(given)} without --memo: stock Megatron would train. Add --memo, or leave {'it' if len(given) == 1 else 'them'} out.")
    return config


def peek(argv: Sequence[str]) -> MemoConfig:
    """Reads the --memo flags out of a whole Megatron command line (``sys.argv[1:]``) without touching the rest. Raises ConfigError."""
    parser = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    return config_from_args(parser.parse_known_args(list(argv))[0])
