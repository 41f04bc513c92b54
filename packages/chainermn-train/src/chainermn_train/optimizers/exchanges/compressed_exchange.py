"""The exchange of gradients that are compressed by PowerSGD."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from typing import Any

import chainer
import numpy as np

from chainermn_comm import CommunicatorBase

from ...collective_errors import raise_together
from ...optimizer_state import saved_value
from ...profiling import region
from ...slots import named_parameters
from ..agreement import OPERATION
from ..gradient_set import (
    Gradient,
    GradientSet,
    is_updated,
    multiply_gradients,
    present_gradient,
    set_scale,
)
from ..parameter_set import ParameterSet
from .gradient_exchange import GradientExchange
from .power_sgd import (
    Matrix,
    PowerSGD,
    factor_size,
    first_matrix,
    is_compressed,
    shape_of,
)


class CompressedExchange(GradientExchange):
    """Each update steps along products of low rank, which are near the means.

    Ranks agree by their gradients, as in the synchronous exchange. Then they take the
    means of the factors *P*, together with the gradients that aren't compressed, and
    those of the factors *Q*. If a rank fails in between, all raise.

    The error of a matrix is a rank's own, and changes with the step alone. If means
    aren't finite, a loss scale may let nobody step: then all errors stay as they were.
    """

    def __init__(
        self, communicator: CommunicatorBase, zero_fill: bool, settings: PowerSGD
    ) -> None:
        super().__init__(communicator, zero_fill)
        self._settings = settings
        # By the names of parameters.
        self._matrices: dict[str, Matrix] = {}
        self._has_told = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        twin._matrices = copy.deepcopy(self._matrices, memo)
        return twin

    @np.errstate(all="ignore")  # the optimizer notices what isn't finite
    def finish(self, params: ParameterSet, scale: float | None, factor: float) -> bool:
        self._tell(params)
        settings = self._settings
        handshake = self._communicator.handshake
        unit = scale or 1.0
        matrices: list[Any] = []
        others = GradientSet([], scale)
        kept = {}  # without matrices of links that were taken out of the model
        with raise_together(handshake, OPERATION, meet=False):
            for name, param in params.namedparams():
                matrix = self._matrices.get(name)
                if is_compressed(settings, param):
                    # The user may have given it an array of another shape.
                    if (
                        matrix is None
                        or matrix.param is not param
                        or matrix.error.shape != shape_of(param)
                    ):
                        matrix = first_matrix(settings, name, param)
                    matrix.make_left(factor / unit)
                    matrices.append(matrix)
                else:
                    own = Gradient(name, param, present_gradient(param))
                    others.gradients.append(own)
                if matrix is not None:
                    kept[name] = matrix
        self._matrices = kept
        if not matrices:
            return super().finish(params, scale, factor)
        self.cancel()  # ranks have agreed by gradients that don't travel
        self._take_means([*matrices, *others.gradients])

        # If a mean is missing, no rank has a gradient.
        matrices = [matrix for matrix in matrices if matrix.grad is not None]
        with raise_together(handshake, OPERATION, meet=False):
            for matrix in matrices:
                matrix.make_right()
        if matrices:
            self._take_means(matrices)

        multiply_gradients(others.gradients, factor)
        others.assign()
        for matrix in matrices:
            matrix.multiply(unit)
        set_scale(params.params, scale)
        means = [each.grad for each in (*others.gradients, *matrices)]
        if scale is not None:  # with which a product may overflow
            means += [matrix.param.grad for matrix in matrices]
        if all([mean is None or np.isfinite(mean).all() for mean in means]):
            for matrix in matrices:
                matrix.step()
        return True

    def _take_means(self, gradients: list[Any]) -> None:
        """Replace gradients by their means (collective)."""
        with region("communication"):
            self._communicator.multi_node_mean_grad(
                GradientSet(gradients, None), self._zero_fill
            )

    def _tell(self, params: ParameterSet) -> None:
        """Say once, on rank 0, by how much gradients are compressed."""
        if self._has_told or self._communicator.rank > 0:
            return
        self._has_told = True
        before = 0
        after = 0
        for param in params.params:
            if param.is_initialized and is_updated(param):
                before += param.size
                after += factor_size(self._settings, param) or param.size
        print(
            f"ChainerMN: {self._settings} sends {after:,} of {before:,} numbers a step, from "
            "start_step on",
            file=sys.stderr,
        )

    def error_norm(self) -> float:
        return math.hypot(*[np.linalg.norm(it.error) for it in self._matrices.values()])

    def serialize(self, serializer: Any, target: Any) -> None:
        """Save or load this rank's matrices, for this number of ranks and of columns."""
        size = self._communicator.size
        rank = self._communicator.rank
        is_loaded = isinstance(serializer, chainer.Deserializer)
        if is_loaded:
            self._matrices = {}
        for name, param in named_parameters(target):
            own = serializer[f"{self._settings.rank}/{rank}/{size}{name}"]
            matrix = self._matrices.get(name)
            if is_loaded:
                right = saved_value(own, "right")
                error = saved_value(own, "error")
                if error is not None:
                    self._matrices[name] = Matrix(name, param, right, error)
            elif matrix is not None:
                own("right", matrix.right)
                own("error", matrix.error)
        if self._matrices:
            if not is_loaded:
                serializer("ranks", size)
        elif is_loaded and rank == size - 1 and saved_value(serializer, "ranks"):
            # As of another number of ranks, or of rank 0 in a snapshot for all.
            warnings.warn(
                "PowerSGD goes on without its errors: what is loaded has none of this rank",
                RuntimeWarning,
                stacklevel=2,
            )
