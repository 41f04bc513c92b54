"""Batch normalization by the mean and variance of all ranks' batches, as a function of Chainer."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
from chainer import Variable, backend
from chainer.backends import cuda

from chainermn_comm import CommunicatorBase

from .call_handshake import handshake
from .collectives import allreduce
from .control_dependencies import Arrays, Gradients, pseudo_connect
from .ordered_function import OrderedFunctionNode

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


@dataclass(eq=False, repr=False)
class SyncBatchNormFunction(OrderedFunctionNode):
    """Normalizes this rank's part of the batch (collective, with one exchange).

    So is backward, if an x needs it. Parts of the batch may be of different sizes, or
    empty. The axes that are averaged over ascend; gamma and beta, the same on all
    ranks, have the shape that is left of x's without them.

    Inputs: x, gamma, beta, and an empty leaf that requires a gradient, since one may be
    needed elsewhere. Output: y, of x's shape and dtype. After ``forward``, the same on
    all ranks: ``count`` of values in a channel, and the whole batch's ``mean`` and
    ``var`` (without correction for the count), float32 or wider, of x's shape but for
    axes of length 1 in ``axis``.
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
        count = 0
        if x.size:
            count = x.size // gamma.size
        mean = x.sum(axis=self.axis, dtype=dtype, keepdims=True)
        mean /= max(count, 1)
        self._shape = mean.shape  # of what is computed for each channel
        centred = xp.subtract(x, mean, dtype=dtype)
        squares = xp.square(centred).sum(axis=self.axis, keepdims=True)
        local = cuda.to_cpu(xp.stack([mean, squares]))
        statistics = self._combine_statistics(count, gamma.shape, local)
        self.mean, self.var = xp.asarray(statistics)
        centred += mean - self.mean
        self._inv_std = 1 / xp.sqrt(self.var + dtype.type(self.eps))
        centred *= self._inv_std * gamma.reshape(self._shape)
        centred += beta.reshape(self._shape)
        return self.with_control_output((centred.astype(x.dtype, copy=False),), like=x)

    def _combine_statistics(
        self, count: int, channels: tuple[int, ...], local: np.ndarray
    ) -> np.ndarray:
        """Return means and variances of the whole batch, combining the ranks' in rank order.

        ``local`` holds this rank's means, then its sums of squares about them, so that
        no digits are lost where the mean is large. Sums over ranks are taken in
        float64. What is returned is of its shape and dtype.
        """
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
        weights = np.array(counts, np.float64)
        weights = weights.reshape(-1, *[1] * len(self._shape))
        self._per_value = 1 / max(self.count, 1)
        mean = (means * weights).sum(axis=0) * self._per_value
        deviations = (means - mean) ** 2 * weights
        var = (deviations + squares).sum(axis=0) * self._per_value
        return np.array([mean, var], local.dtype)

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        self._call.require_graph(f"backward of {NAME}", self.comm.rank)
        x, gamma = self.get_retained_inputs()
        (gy,) = self.connected_gradients(grad_outputs)
        gradients: Gradients
        if chainer.config.enable_backprop:
            gradients = self._differentiable(x, gamma, gy)
        else:
            gradients = self._gradients(x.array, gamma.array, gy.array)
        of_inputs = (*gradients, None)  # none of the leaf
        return tuple(of_inputs[index] for index in indexes)

    def _gradients(self, x: Any, gamma: Any, gy: Any) -> Gradients:
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
            local = cuda.to_cpu(xp.stack([scale * ggamma, scale * gbeta]))
            call = handshake(
                self.comm,
                f"backward of {NAME}",
                payload=local.tobytes(),
                forward_id=self._call.call_id,
            )
            means = _stack_ranks(call.payloads, local).sum(axis=1)
            means *= self._per_value
            of_gamma, of_beta = xp.asarray(means.astype(dtype))
            x_hat *= -of_gamma
            x_hat += scale * gy
            x_hat -= of_beta
            x_hat *= self._inv_std
            gx = Variable(x_hat.astype(x.dtype, copy=False))
        parameters = [
            Variable(each.astype(gamma.dtype).reshape(gamma.shape))
            for each in (ggamma, gbeta)
        ]
        return gx, *parameters

    def _differentiable(self, x: Variable, gamma: Variable, gy: Variable) -> Gradients:
        """Return the same gradients, made of functions that can be differentiated again."""
        dtype = self._dtype

        def spread(channels: Any) -> Variable:
            return F.broadcast_to(channels, x.shape)

        def channel_sum(values: Variable) -> Variable:
            return F.sum(values, axis=self.axis, keepdims=True)

        def mean_over_ranks(sums: Variable) -> Variable:
            return allreduce(self.comm, sums * self._per_value)

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
            sums *= self._per_value
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
    """Return the ranks' arrays of two rows, like this one, as float64 (2, ranks, ...)."""
    flat = np.frombuffer(b"".join(payloads), like.dtype).astype(np.float64)
    return flat.reshape(len(payloads), *like.shape).swapaxes(0, 1)
