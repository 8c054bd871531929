"""A plan as a picture: time across, address up, one rectangle a buffer in the colour of its layer; below, live bytes against what is reserved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .errors import PictureError
from .records import Buffer, Plan

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
_STEP_COLOUR = (0.6, 0.6, 0.6, 1.0)
_MOST_IN_LEGEND = 8


def require_library() -> None:
    """Raises PictureError where matplotlib, an optional extra, is not installed: better before planning than after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PictureError("--picture: expected matplotlib; it is not installed. pip install matplotlib, or leave --picture out.") from error


def draw(path: str, buffers: Sequence[Buffer], plan: Plan, capacity_bytes: Optional[int] = None) -> None:
    """Writes the picture; the name's ending chooses the format (png, svg, pdf). Raises PictureError when it cannot be drawn or written."""
    require_library()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    divisor, unit = next((size, name) for size, name in _UNITS if plan.peak_bytes >= size)
    figure = Figure(figsize=(14, 9), dpi=120)
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    colours = layer_colours(buffers)
    rectangles, faces = [], []
    for buffer, offset in zip(buffers, plan.offsets_bytes):
        bottom, top = offset / divisor, (offset + buffer.size_bytes) / divisor
        rectangles.append([(buffer.lower, bottom), (buffer.upper, bottom), (buffer.upper, top), (buffer.lower, top)])
        faces.append(colours[layer_of(buffer)])
    upper.add_collection(PolyCollection(rectangles, facecolors=faces, edgecolors="black", linewidths=0.15))
    times, live_bytes = live_curve(buffers)
    lower.fill_between(times, [value / divisor for value in live_bytes], step="post", color="tab:blue", linewidth=0, label="live")
    for axes in (upper, lower):
        axes.axhline(plan.peak_bytes / divisor, color="tab:red", linewidth=1, label="reserved")
        if capacity_bytes is not None:
            axes.axhline(capacity_bytes / divisor, color="black", linewidth=1, linestyle="--", label="capacity")
        axes.set_xlim(times[0], times[-1])
        axes.set_ylim(0, 1.04 * max(plan.peak_bytes, capacity_bytes or 0) / divisor)
        axes.set_ylabel(f"{'address' if axes is upper else 'bytes'}, {unit}")
    lower.set_xlabel("request")
    lower.legend(loc="lower right", fontsize="small")
    layers = list(colours)
    if len(layers) > 1:
        shown = layers if len(layers) <= _MOST_IN_LEGEND else [*layers[: _MOST_IN_LEGEND - 1], layers[-1]]
        patches = [Patch(color=colours[layer], label=f"layer {layer}" if layer else "step") for layer in shown]
        upper.legend(handles=patches, loc="upper right", fontsize="small")
    upper.set_title(f"{len(buffers)} buffers, peak {plan.peak_bytes} bytes, {plan.ratio:.4f} of the largest live load, {plan.method}", fontsize="medium", wrap=True)
    try:
        figure.savefig(path, format=Path(path).suffix[1:] or "png", bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise PictureError(f"{path}: the picture cannot be written: {error}. Name a .png, .svg or .pdf file in a folder that can be written to.") from error


def layer_of(buffer: Buffer) -> str:
    """What stands before the first slash; "" for the step's own buffers."""
    return buffer.layer.partition("/")[0]


def layer_colours(buffers: Sequence[Buffer]) -> Dict[str, Any]:
    """A colour for each layer, in the order of their numbers from dark to light, so that a pass through the stack shows as a slope. The step is grey."""
    from matplotlib import colormaps

    layers = sorted({layer_of(buffer) for buffer in buffers} - {""}, key=_natural)
    scale = colormaps["viridis"]
    colours: Dict[str, Any] = {"": _STEP_COLOUR} if any(not buffer.layer for buffer in buffers) else {}
    for at, layer in enumerate(layers):
        colours[layer] = scale(at / max(1, len(layers) - 1))
    return colours


def _natural(text: str) -> List[Any]:
    """Sorts "layer 10" after "layer 9"."""
    return [(0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text)]


def live_curve(buffers: Sequence[Buffer]) -> Tuple[List[int], List[int]]:
    """Instants at which the live load changes, and the load in bytes from each of them on."""
    change: Dict[int, int] = {}
    for buffer in buffers:
        change[buffer.lower] = change.get(buffer.lower, 0) + buffer.size_bytes
        change[buffer.upper] = change.get(buffer.upper, 0) - buffer.size_bytes
    times = sorted(change)
    live_bytes, now = [], 0
    for instant in times:
        now += change[instant]
        live_bytes.append(now)
    return times, live_bytes
