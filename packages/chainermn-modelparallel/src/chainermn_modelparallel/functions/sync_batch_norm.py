"""Batch normalization by the mean and variance of all ranks' batches, as a function of Chainer."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
from chainer import Variable, backend
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
    leaf = Variable(empty_on_device_of(x.array))
    return node.apply((x, gamma, beta, leaf))[0], node


@dataclass(eq=False, repr=False)
class SyncBatchNormFunction(OrderedFunctionNode):
    """Normalizes this rank's part of the batch (collective, with one exchange).

    Inputs: x, gamma, beta, and an empty leaf that requires a gradient, since one may be
    needed elsewhere. Output: y. After ``forward``, the same on all ranks: ``count`` of
    values in a channel, and the whole batch's ``mean`` and ``var`` (without correction
    for the count), float32 or wider, of x's shape but for axes of length 1 in ``axis``.
    """

    label = NAME
    comm: CommunicatorBase
    eps: float
    axis: tuple[int, ...]
    x_requires_grad: bool
    mean: Any = None
    var: Any = None

    def forward(self, inputs: Arrays) -> Arrays:
        self.retain_inputs((0, 1))
        x, gamma, beta, _ = inputs
        xp = backend.get_array_module(x)
        dtype = np.result_type(x.dtype, gamma.dtype, np.float32)
        self._dtype = dtype
        # Of what is computed for each channel.
        self._shape = tuple(1 if i in self.axis else n for i, n in enumerate(x.shape))
        count = x.size // gamma.size if gamma.size else 0
        mean = x.sum(axis=self.axis, dtype=dtype, keepdims=True) / max(count, 1)
        centred = xp.subtract(x, mean, dtype=dtype)
        squares = xp.square(centred).sum(axis=self.axis, keepdims=True)
        local = xp.concatenate([mean.ravel(), squares.ravel()])
        statistics = self._combine_statistics(count, cuda.to_cpu(local))
        self.mean, self.var = xp.asarray(statistics).reshape(2, *self._shape)
        centred += mean - self.mean
        self._inv_std = 1 / xp.sqrt(self.var + dtype.type(self.eps))
        centred *= self._inv_std * gamma.reshape(self._shape)
        centred += beta.reshape(self._shape)
        return self.with_control_output((centred.astype(x.dtype, copy=False),), like=x)

    def _combine_statistics(self, count: int, local: np.ndarray) -> np.ndarray:
        """Return means and variances of the whole batch, combining the ranks' in rank order.

        ``local`` holds this rank's means, then its sums of squares about them, so that
        no digits are lost where the mean is large. Sums over ranks are taken in
        float64. What is returned is of its dtype, with a row for each of the two.
        """
        channels = tuple(n for i, n in enumerate(self._shape) if i not in self.axis)
        self._call = handshake(
            self.comm,
            NAME,
            (("dtype and channels", local.dtype, channels),),
            requires_grad=self.x_requires_grad,
            payload=_COUNT.pack(count) + local.tobytes(),
        )
        rows = self._call.payloads
        counts = [_COUNT.unpack_from(row)[0] for row in rows]
        self.count = sum(counts)
        means, squares = _stack_ranks([row[_COUNT.size :] for row in rows], local)
        weights = np.array(counts, np.float64)[:, None]
        per_value = 1 / max(self.count, 1)
        mean = (means * weights).sum(axis=0) * per_value
        deviations = (means - mean) ** 2 * weights
        var = (deviations + squares).sum(axis=0) * per_value
        return np.array([mean, var], local.dtype)

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        self._call.require_graph(f"backward of {NAME}", self.comm.rank)
        x, gamma = self.get_retained_inputs()
        gy, hidden = grad_outputs
        if gy is None:
            gy = zeros_for_input(self, 0)
        gradients: Gradients
        if chainer.config.enable_backprop:
            (control,) = keep_control_dependencies((hidden,), (self.control_output(),))
            gradients = self._differentiable(x, gamma, pseudo_connect(control, gy))
        else:
            arrays = self._gradients(x.array, gamma.array, gy.array)
            gradients = tuple(
                None if each is None else Variable(each) for each in arrays
            )
        return tuple(gradients[index] if index < 3 else None for index in indexes)

    def _gradients(self, x: Any, gamma: Any, gy: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of x, gamma and beta; of x only if some rank needs it."""
        xp = backend.get_array_module(x)
        dtype = self._dtype
        scale = gamma.astype(dtype, copy=False).reshape(self._shape)
        x_hat = xp.subtract(x, self.mean, dtype=dtype)
        x_hat *= self._inv_std
        gbeta = gy.sum(axis=self.axis, dtype=dtype, keepdims=True)
        ggamma = (gy * x_hat).sum(axis=self.axis, keepdims=True)
        gx = None
        if self._call.requires_grad:
            sums = [(scale * ggamma).ravel(), (scale * gbeta).ravel()]
            local = cuda.to_cpu(xp.concatenate(sums))
            call = handshake(
                self.comm,
                f"backward of {NAME}",
                payload=local.tobytes(),
                forward_id=self._call.call_id,
            )
            means = _stack_ranks(call.payloads, local).sum(axis=1)
            means *= 1 / max(self.count, 1)
            of_gamma, of_beta = xp.asarray(means.astype(dtype)).reshape(2, *self._shape)
            x_hat *= -of_gamma
            x_hat += scale * gy
            x_hat -= of_beta
            x_hat *= self._inv_std
            gx = x_hat.astype(x.dtype, copy=False)
        return gx, *[
            each.astype(gamma.dtype).reshape(gamma.shape) for each in (ggamma, gbeta)
        ]

    def _differentiable(
        self, x: Variable, gamma: Variable, gy: Variable
    ) -> tuple[Variable | None, Variable, Variable]:
        """Return the same gradients, made of functions that can be differentiated again."""
        dtype = self._dtype
        per_value = 1 / max(self.count, 1)

        def spread(channels: Any) -> Variable:
            return F.broadcast_to(channels, x.shape)

        def channel_sum(values: Variable) -> Variable:
            return F.sum(values, axis=self.axis, keepdims=True)

        def mean_over_ranks(sums: Variable) -> Variable:
            return allreduce(self.comm, sums * per_value)

        centred = F.cast(x, dtype)
        gy = F.cast(gy, dtype)
        if self._call.requires_grad:
            centred -= spread(mean_over_ranks(channel_sum(centred)))
            var = mean_over_ranks(channel_sum(centred * centred))
            inv_std = spread((var + self.eps) ** -0.5)
        else:  # x is data on all ranks
            centred -= spread(self.mean)
            inv_std = spread(self._inv_std)
        x_hat = centred * inv_std
        gbeta = channel_sum(gy)
        ggamma = channel_sum(gy * x_hat)
        gx = None
        if self._call.requires_grad:
            scale = F.reshape(F.cast(gamma, dtype), self._shape)
            sums = allreduce(self.comm, F.stack([scale * ggamma, scale * gbeta]))
            sums *= per_value
            gx = spread(scale) * gy - (x_hat * spread(sums[0]) + spread(sums[1]))
            gx = F.cast(gx * inv_std, x.dtype)
            # A second backward from any of the three then takes part in the exchanges
            # above.
            ggamma, gbeta = pseudo_connect(sums, ggamma, gbeta)
        ggamma, gbeta = [
            F.reshape(F.cast(each, gamma.dtype), gamma.shape)
            for each in (ggamma, gbeta)
        ]
        return gx, ggamma, gbeta


def _stack_ranks(payloads: list[bytes], like: np.ndarray) -> np.ndarray:
    """Return the halves of ranks' arrays, of this one's dtype, as float64 (2, ranks, ...)."""
    flat = np.frombuffer(b"".join(payloads), like.dtype).astype(np.float64)
    return flat.reshape(len(payloads), 2, like.size // 2).swapaxes(0, 1)
