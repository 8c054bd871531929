"""Errors of the planner."""

from __future__ import annotations

from ..errors import MemoError


class TraceError(MemoError, ValueError):
    """A trace or plan file, or a buffer in it, is not as it must be. The message names the line or the buffer."""


class InvalidPlanError(MemoError):
    """A plan would put two live buffers at one address, or says of itself what is not true."""


class PictureError(MemoError):
    """The picture cannot be drawn or written."""
