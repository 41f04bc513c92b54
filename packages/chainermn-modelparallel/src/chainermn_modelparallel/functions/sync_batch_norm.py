"""Batch normalization by the mean and variance of all ranks' batches, as a function of Chainer."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
from chainer import Variable
from chainer.backends import cuda

from chainermn_comm import CommunicatorBase
from chainermn_comm.errors import raise_together

from .arguments import check_communicator
from .call_handshake import handshake
from .collectives import allreduce
from .control_dependencies import (
    keep_control_dependencies,
    pseudo_connect,
    zeros_for_input,
)
from .ordered_function import (
    SCOPE,
    Arrays,
    Gradients,
    OrderedFunctionNode,
    empty_on_device_of,
    make_variable,
    requires_grad_mask,
)

NAME = "MultiNodeBatchNormalization"
BACKENDS = ("auto", "mpi", "nccl")
_COUNT = struct.Struct("<Q")


def get_communication_backend(comm: Any, communication_backend: str = "auto") -> str:
    """Return which backend a :class:`MultiNodeBatchNormalization` uses (not collective).

    Args:
        comm: its communicator, any.
        communication_backend: ``"auto"``, ``"mpi"`` or ``"nccl"``.

    Returns:
        ``"mpi"`` for ``"auto"``, since statistics are small, else what was given.

    Raises:
        ValueError: there is no such backend.
    """
    if communication_backend not in BACKENDS:
        raise ValueError(
            f"communication_backend must be one of {', '.join(BACKENDS)}, got "
            f"{communication_backend!r}"
        )
    return "mpi" if communication_backend == "auto" else communication_backend


def sync_batch_norm(
    comm: CommunicatorBase,
    eps: float,
    make_inputs: Callable[[], tuple[Variable, Variable, Variable, tuple[int, ...]]],
) -> tuple[Variable, SyncBatchNormFunction]:
    """Normalize this rank's part of the batch (collective; so is backward, if an x needs it).

    ``make_inputs`` returns x, gamma, beta and the axes that are averaged over, which
    ascend; what it raises is raised here, and as PeerError on the other ranks. Parts of
    the batch may be of different sizes, or empty. gamma and beta, the same on all
    ranks, have the shape that is left of x's without the axes. Returns y, of x's shape
    and dtype, and the function, which knows the statistics.
    """
    comm = check_communicator(comm)
    with raise_together(comm.handshake, SCOPE + NAME, meet=False):
        x, gamma, beta, axis = make_inputs()
    node = SyncBatchNormFunction(comm, eps, axis, requires_grad_mask((x,)) == b"\1")
    leaf = make_variable(empty_on_device_of(x.array), True)
    return node.apply((x, gamma, beta, leaf))[0], node


@dataclass(eq=False, repr=False)
class SyncBatchNormFunction(OrderedFunctionNode):
    """Normalizes this rank's part of the batch (collective, with one exchange).

    Inputs: x, gamma, beta, and an empty leaf that requires a gradient, since one may be
    needed elsewhere. Output: y. After ``forward``, the same on all ranks: ``count`` of
    values in a channel, and the whole batch's ``mean`` and ``var`` (without correction
    for the count), float32 or wider, of gamma's shape.
    """

    label = NAME
    comm: CommunicatorBase
    eps: float
    axis: tuple[int, ...]
    x_requires_grad: bool

    def forward(self, inputs: Arrays) -> Arrays:
        self.retain_inputs((0, 1))
        x, gamma, beta = inputs[:3]
        self.empty_array = empty_on_device_of(x)
        xp = self._xp
        self._dtype = np.result_type(x.dtype, gamma.dtype, np.float32)
        # Where gamma's axes lie among x's.
        self._expander = tuple(
            None if i in self.axis else slice(None) for i in range(x.ndim)
        )
        expander = self._expander
        count = x.size // gamma.size if gamma.size else 0
        # Mean of each channel; squares about it.
        local = xp.zeros((2, *gamma.shape), self._dtype)
        if count:
            x.sum(axis=self.axis, dtype=self._dtype, out=local[0, ...])
            local[0] /= count
        centred = xp.subtract(x, local[0][expander], dtype=self._dtype)
        xp.square(centred).sum(axis=self.axis, out=local[1, ...])
        self._combine_statistics(count, cuda.to_cpu(local))
        centred += (local[0] - self.mean)[expander]
        self._inv_std = 1 / xp.sqrt(self.var + self._dtype.type(self.eps))
        centred *= (self._inv_std * gamma)[expander]
        centred += beta[expander]
        return (centred.astype(x.dtype, copy=False),)

    def _combine_statistics(self, count: int, local: np.ndarray) -> None:
        """Set count, mean and variance of the whole batch, combining the ranks' in rank order.

        Deviations are from each rank's own mean, so that no digits are lost where the
        mean is large; the sums over ranks are taken in float64.
        """
        shape = local.shape[1:]
        signature = (("dtype and channels", local.dtype, shape),)
        payload, needed = _COUNT.pack(count) + local.tobytes(), self.x_requires_grad
        call = handshake(
            self.comm, NAME, signature, requires_grad=needed, payload=payload
        )
        self._call = call
        counts = [_COUNT.unpack_from(row)[0] for row in call.payloads]
        self.count = sum(counts)
        means, squares = _stack_ranks(
            [row[_COUNT.size :] for row in call.payloads], local
        )
        # Arrays without axes: NumPy takes longer for Python's numbers, and for axes of
        # one.
        per_value = np.array(1 / max(self.count, 1))
        weights = np.array(float(counts[0]))  # nearly always that of all ranks
        if counts.count(counts[0]) < len(counts):
            weights = np.array(counts, np.float64).reshape(-1, *(1,) * len(shape))
        center = (means * weights).sum(axis=0)
        center *= per_value
        means -= center
        means *= means
        means *= weights
        means += squares
        var = means.sum(axis=0)
        var *= per_value
        self.mean = self._xp.asarray(center.astype(local.dtype))
        self.var = self._xp.asarray(var.astype(local.dtype))

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        self._call.require_graph(f"backward of {NAME}", self.comm.rank)
        x, gamma = self.get_retained_inputs()
        gy = zeros_for_input(self, 0) if grad_outputs[0] is None else grad_outputs[0]
        gradients: Gradients
        if chainer.config.enable_backprop:
            (control,) = keep_control_dependencies(
                grad_outputs[1:], (self.control_output(),)
            )
            gradients = self._differentiable(x, gamma, pseudo_connect(control, gy))
        else:
            arrays = self._gradients(x.array, gamma.array, gy.array)
            gradients = tuple(
                None if each is None else make_variable(each, True) for each in arrays
            )
        return tuple(gradients[index] if index < 3 else None for index in indexes)

    def _gradients(self, x: Any, gamma: Any, gy: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of x, gamma and beta; of x only if some rank needs it."""
        xp, expander, dtype = self._xp, self._expander, self._dtype
        scale = gamma.astype(dtype, copy=False)
        x_hat = xp.subtract(x, self.mean[expander], dtype=dtype)
        x_hat *= self._inv_std[expander]
        gbeta = gy.sum(axis=self.axis, dtype=dtype)
        ggamma = (gy * x_hat).sum(axis=self.axis)
        gx = None
        if self._call.requires_grad:
            local = xp.empty((2, *gamma.shape), dtype)
            xp.multiply(scale, ggamma, out=local[0, ...])
            xp.multiply(scale, gbeta, out=local[1, ...])
            host, call_id = cuda.to_cpu(local), self._call.call_id
            operation, payload = f"backward of {NAME}", host.tobytes()
            call = handshake(self.comm, operation, payload=payload, forward_id=call_id)
            means = _stack_ranks(call.payloads, host).sum(axis=1)
            means *= 1 / max(self.count, 1)
            of_gamma, of_beta = xp.asarray(means.astype(dtype))
            x_hat *= -of_gamma[expander]
            x_hat += scale[expander] * gy
            x_hat -= of_beta[expander]
            x_hat *= self._inv_std[expander]
            gx = x_hat.astype(x.dtype, copy=False)
        # Arrays even for one channel without an axis: NumPy makes scalars there.
        return gx, xp.asarray(ggamma, gamma.dtype), xp.asarray(gbeta, gamma.dtype)

    def _differentiable(
        self, x: Variable, gamma: Variable, gy: Variable
    ) -> tuple[Variable | None, Variable, Variable]:
        """Return the same gradients, made of functions that can be differentiated again."""
        axis, dtype, shape = self.axis, self._dtype, x.shape
        ones = tuple(1 if i in axis else n for i, n in enumerate(shape))
        per_value = 1 / max(self.count, 1)

        def spread(channels: Any) -> Variable:
            return F.broadcast_to(F.reshape(channels, ones), shape)

        def total(values: Variable) -> Variable:
            return allreduce(self.comm, F.sum(values, axis=axis) * per_value)

        wide, gy = F.cast(x, dtype), F.cast(gy, dtype)
        if self._call.requires_grad:
            centred = wide - spread(total(wide))
            inv_std = spread((total(centred * centred) + self.eps) ** -0.5)
        else:  # x is data on all ranks
            centred, inv_std = wide - spread(self.mean), spread(self._inv_std)
        x_hat = centred * inv_std
        gbeta, ggamma = F.sum(gy, axis=axis), F.sum(gy * x_hat, axis=axis)
        gx = None
        if self._call.requires_grad:
            scale = F.cast(gamma, dtype)
            sums = (
                allreduce(self.comm, F.stack([scale * ggamma, scale * gbeta]))
                * per_value
            )
            gx = spread(scale) * gy - (x_hat * spread(sums[0]) + spread(sums[1]))
            gx = F.cast(gx * inv_std, x.dtype)
            # A second backward from any of the three then takes part in the exchanges
            # above.
            ggamma, gbeta = pseudo_connect(sums, ggamma, gbeta)
        return gx, F.cast(ggamma, gamma.dtype), F.cast(gbeta, gamma.dtype)


def _stack_ranks(payloads: list[bytes], like: np.ndarray) -> np.ndarray:
    """Return the ranks' arrays of two rows, shaped like this one, as float64 (2, ranks, ...)."""
    by_rank = np.frombuffer(b"".join(payloads), like.dtype).reshape(
        len(payloads), *like.shape
    )
    by_row: np.ndarray = by_rank.swapaxes(0, 1).astype(np.float64, order="C")
    return by_row
