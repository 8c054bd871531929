"""Traces and plans in the CSV format of google/minimalloc, with a column of ours for the layer.

    id,lower,upper,size[,offset][,layer]

One header line names the columns, in any order; lifetimes are half open. Other columns of minimalloc (alignment, gaps, ...) change the problem and
are refused rather than ignored. A file is data: nothing in it is evaluated, and every line that is not as it must be is an error that names it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union

from .errors import TraceError
from .records import Buffer

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("offset", "layer")
# The planner computes with 64-bit integers; sums of sizes must stay within them.
LARGEST = 2**62
_WHOLE = re.compile(r"[0-9]{1,19}", re.ASCII)
_SHOWN = 80


def read_trace(path: Union[str, Path]) -> List[Buffer]:
    """The buffers of a trace, in the order of the file; offsets are read past.

    Raises TraceError for an unreadable file, or naming the first bad line, what was expected and what was found.
    """
    return [buffer for buffer, _ in _read(path, REQUIRED)]


def read_plan(path: Union[str, Path]) -> Tuple[List[Buffer], List[int]]:
    """The buffers of a plan and their offsets in bytes. Overlaps are the validator's business. Raises TraceError as :func:`read_trace` does."""
    rows = _read(path, (*REQUIRED, "offset"))
    return [buffer for buffer, _ in rows], [offset for _, offset in rows]


def write_trace(path: Union[str, Path], buffers: Sequence[Buffer]) -> None:
    """Writes a trace, whole or not at all. Raises TraceError when it cannot be written."""
    _write(path, buffers, None)


def write_plan(path: Union[str, Path], buffers: Sequence[Buffer], offsets_bytes: Sequence[int]) -> None:
    """Writes a trace with its offsets, whole or not at all. Raises TraceError when it cannot be written."""
    _write(path, buffers, offsets_bytes)


def _read(path: Union[str, Path], required: Sequence[str]) -> List[Tuple[Buffer, int]]:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}. Name a CSV file with the columns {','.join(required)}.") from error
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    columns = _columns(path, lines[0] if lines else b"", required)
    rows: List[Tuple[Buffer, int]] = []
    line_of: Dict[str, int] = {}
    total_bytes = 0
    for number, line in enumerate(lines[1:], start=2):
        buffer, offset = _row(path, number, line, columns)
        if buffer.id in line_of:
            raise _bad(path, number, "an id that no other line has", f"{buffer.id!r}, which line {line_of[buffer.id]} has too", "Rename one of them.")
        line_of[buffer.id] = number
        total_bytes += buffer.size_bytes
        if total_bytes >= LARGEST:
            raise _bad(path, number, "sizes that add up to less than 2^62 bytes", f"{total_bytes} up to here", "Sizes are in bytes: correct them.")
        rows.append((buffer, offset))
    if not rows:
        raise _bad(path, 2, "at least one buffer", "the end of the file", "Record the trace again.")
    return rows


def _columns(path: Union[str, Path], line: bytes, required: Sequence[str]) -> Tuple[str, ...]:
    names = tuple(name.strip() for name in _text(path, 1, line).split(","))
    known = (*REQUIRED, *OPTIONAL)
    if len(set(names)) != len(names) or not set(required) <= set(names) or not set(names) <= set(known):
        unknown = [name for name in names if name not in known]
        advice = f"Remove {', '.join(map(repr, unknown))}: the planner would not honour it." if unknown and set(required) <= set(names) else "Write that line first."
        optional = [name for name in OPTIONAL if name not in required]
        raise _bad(path, 1, f"a header with {','.join(required)} and, if wanted, {','.join(optional)}", repr(",".join(names)[:_SHOWN]), advice)
    return names


def _row(path: Union[str, Path], number: int, line: bytes, columns: Sequence[str]) -> Tuple[Buffer, int]:
    text = _text(path, number, line)
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) != len(columns):
        raise _bad(path, number, f"{len(columns)} values ({','.join(columns)})", f"{len(cells)} in {text[:_SHOWN]!r}", "Correct or remove the line.")
    row = dict(zip(columns, cells))
    whole = {name: _whole(path, number, name, row[name]) for name in columns if name not in ("id", "layer")}
    if not row["id"]:
        raise _bad(path, number, "an id", "none", "Give the buffer a name.")
    if whole["lower"] >= whole["upper"]:
        found = f"lower {whole['lower']}, upper {whole['upper']}"
        raise _bad(path, number, "lower below upper (the buffer is alive from lower until just before upper)", found, "Correct the lifetime.")
    if whole["size"] == 0:
        raise _bad(path, number, "a size of at least 1 byte", "0", "Remove the line: it needs no memory.")
    return Buffer(row["id"], whole["lower"], whole["upper"], whole["size"], row.get("layer", "")), whole.get("offset", 0)


def _whole(path: Union[str, Path], number: int, name: str, cell: str) -> int:
    if not _WHOLE.fullmatch(cell) or int(cell) >= LARGEST:
        raise _bad(path, number, f"{name}: a whole number from 0 to below 2^62", repr(cell[:_SHOWN]), "Correct the value.")
    return int(cell)


def _text(path: Union[str, Path], number: int, line: bytes) -> str:
    try:
        text = line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(path, number, "UTF-8 text", f"byte 0x{line[error.start]:02x} in column {error.start + 1}", "Is this a CSV file?") from error
    if not text.isprintable():
        raise _bad(path, number, "printable text", repr(text[:_SHOWN]), "Is this a CSV file?")
    return text


def _bad(path: Union[str, Path], number: int, expected: str, found: str, advice: str) -> TraceError:
    return TraceError(f"{path}, line {number}: expected {expected}; found {found}. {advice}")


def _write(path: Union[str, Path], buffers: Sequence[Buffer], offsets_bytes: Optional[Sequence[int]]) -> None:
    layers = any(buffer.layer for buffer in buffers)
    header = [*REQUIRED, *(["offset"] if offsets_bytes is not None else []), *(["layer"] if layers else [])]
    lines = [",".join(header)]
    for index, buffer in enumerate(buffers):
        for name, text in (("id", buffer.id), ("layer", buffer.layer)):
            if not text.isprintable() or "," in text or text != text.strip():
                raise TraceError(f"buffer {buffer.id!r}: expected {name} without comma, line break or blanks around it; found {text!r}. Rename it.")
        cells = [buffer.id, str(buffer.lower), str(buffer.upper), str(buffer.size_bytes)]
        if offsets_bytes is not None:
            cells.append(str(offsets_bytes[index]))
        if layers:
            cells.append(buffer.layer)
        lines.append(",".join(cells))
    partial = Path(f"{path}.partial")
    try:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}. Name a file in a folder that can be written to.") from error
