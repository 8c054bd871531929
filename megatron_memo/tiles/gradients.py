"""Parameter gradients of several tiles, summed once."""

from __future__ import annotations

from typing import List, Optional, Sequence

import torch
from torch import Tensor


class GradientSum:
    """Sums what each tile contributes to each parameter.

    Tiles of a 16-bit run are summed in float32 and rounded once: sums in bfloat16 lose a bit with every doubling of the tile count. A
    weight whose gradient a fused kernel has already added to ``main_grad`` comes with a placeholder or with nothing; see
    :meth:`finish`.
    """

    def __init__(self, parameters: Sequence[Tensor], tiles: int) -> None:
        self._parameters, self._alone = parameters, tiles == 1
        self._sums: List[Optional[Tensor]] = [None] * len(parameters)

    def add(self, gradients: Sequence[Optional[Tensor]]) -> None:
        """``gradients``: one for each parameter, or None where the tile has none."""
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if self._alone or getattr(self._parameters[index], "grad_added_to_main_grad", False):
                self._sums[index] = gradient
            elif self._sums[index] is None:
                wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
                self._sums[index] = gradient.to(wide, copy=True)
            else:
                self._sums[index].add_(gradient)

    def finish(self, fused: Sequence[bool]) -> List[Optional[Tensor]]:
        """The gradients in the parameters' own dtypes.

        ``fused`` says which parameters a fused kernel adds to ``main_grad`` by itself. Under saved-tensor hooks Megatron's own linears
        see such a weight without its attributes, so they neither return a placeholder nor say that ``main_grad`` is done; both happen here.
        """
        for index, (parameter, sum_, by_kernel) in enumerate(zip(self._parameters, self._sums, fused)):
            if by_kernel and sum_ is None:
                parameter.grad_added_to_main_grad = True
                make = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
                self._sums[index] = make(parameter)
            elif sum_ is not None and sum_.dtype != parameter.dtype:
                self._sums[index] = sum_.to(parameter.dtype)
        return self._sums
