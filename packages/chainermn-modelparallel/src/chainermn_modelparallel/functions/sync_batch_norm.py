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
from .control_dependencies import (
    Arrays,
    Gradients,
    empty_on_device_of,
    pseudo_connect,
)
from .ordered_function import OrderedFunctionNode

NAME = "MultiNodeBatchNormalization"
BACKENDS = ("auto", "mpi", "nccl")
_COUNT = struct.Struct("<Q")


def get_communication_backend(comm: Any, communication_backend: str = "auto") -> str:
    """Return which backend a :class:`MultiNodeBatchNormalization` uses (not collective).

    Args:
        comm: the link's communicator, which has no influence.
        communication_backend: ``"auto"``, ``"mpi"`` or ``"nccl"``.

    Returns:
        ``"mpi"`` for ``"auto"``, since statistics are small, and otherwise
        ``communication_backend``.

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
    """Normalizes this rank's part of the batch (collective).

    Backward is collective, too, if the x of some rank needs a gradient. Parts of the
    batch may be of different sizes, or empty. The axes that are averaged over are in
    ascending order. gamma and beta are the same on all ranks and have x's shape without
    these axes.

    Inputs: x, gamma, beta, and an empty leaf that requires a gradient, since another
    rank may need one. Output: y, of x's shape and dtype. After ``forward`` three
    attributes are the same on all ranks: ``count``, the number of values in a channel,
    and ``mean`` and ``var`` of the whole batch (without correction for the count).
    These two are float32 or wider; their shape is x's with axes of length 1 in
    ``axis``.
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
        count = x.size // max(gamma.size, 1)
        mean = x.sum(axis=self.axis, dtype=dtype, keepdims=True)
        mean /= max(count, 1)
        self._shape = mean.shape  # the shape of one number for each channel
        centred = xp.subtract(x, mean, dtype=dtype)
        squares = xp.square(centred).sum(axis=self.axis, keepdims=True)

        # Sums of squares about the ranks' own means lose no digits where the mean is
        # large. All ranks combine the ranks' sums in rank order, in float64.
        local = cuda.to_cpu(xp.stack([mean, squares]))
        self._call = handshake(
            self.comm,
            NAME,
            (("dtype and channels", dtype, gamma.shape),),
            requires_grad=self.x_requires_grad,
            payload=_COUNT.pack(count) + local.tobytes(),
        )
        rows = self._call.payloads
        counts = [_COUNT.unpack_from(row)[0] for row in rows]
        self.count = sum(counts)
        self._per_value = 1 / max(self.count, 1)
        means, squares = _stack_ranks([row[_COUNT.size :] for row in rows], local)
        weights = np.array(counts, np.float64)
        weights = weights.reshape(-1, *[1] * len(self._shape))
        whole_mean = (means * weights).sum(axis=0) * self._per_value
        deviations = (means - whole_mean) ** 2 * weights
        whole_var = (deviations + squares).sum(axis=0) * self._per_value
        self.mean, self.var = xp.asarray(np.array([whole_mean, whole_var], dtype))

        centred += mean - self.mean
        self._inv_std = 1 / xp.sqrt(self.var + dtype.type(self.eps))
        centred *= self._inv_std * gamma.reshape(self._shape)
        centred += beta.reshape(self._shape)
        return self.with_delegate_output((centred.astype(x.dtype, copy=False),), like=x)

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        self._call.require_graph(f"backward of {NAME}", self.comm.rank)
        x, gamma = self.get_retained_inputs()
        (gy,) = self.connected_gradients(grad_outputs)
        if chainer.config.enable_backprop:
            gradients = self._differentiable(x, gamma, gy)
        else:
            gradients = self._gradients(x.array, gamma.array, gy.array)
        of_inputs = (*gradients, None)  # the leaf gets no gradient
        return tuple(of_inputs[index] for index in indexes)

    def _gradients(self, x: Any, gamma: Any, gy: Any) -> Gradients:
        """Return the gradients of x, gamma and beta; None for x if no rank needs its gradient."""
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
                forward=self._call,
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
        """Return the same gradients by Chainer's functions, so that they can be differentiated."""
        dtype = self._dtype

        def spread(channels: Any) -> Variable:
            return F.broadcast_to(F.cast(channels, dtype), x.shape)

        def batch_mean(values: Variable) -> Variable:
            sums = F.sum(values, axis=self.axis, keepdims=True)
            return allreduce(self.comm, sums * self._per_value)

        # This rank takes part in all exchanges, whether or not it needs these gradients.
        leaf = Variable(empty_on_device_of(x.array))
        x, gamma, beta = pseudo_connect(leaf, x, gamma, self.xp.zeros_like(gamma.array))
        centred = F.cast(x, dtype)
        if self._call.requires_grad:
            centred -= spread(batch_mean(centred))
            inv_std = (batch_mean(centred * centred) + self.eps) ** -0.5
        else:  # x is data on all ranks
            centred -= spread(self.mean)
            inv_std = self._inv_std
        y = centred * spread(inv_std) * spread(F.reshape(gamma, self._shape))
        y += spread(F.reshape(beta, self._shape))
        gx, ggamma, gbeta = chainer.grad(
            [F.cast(y, x.dtype)],
            [x, gamma, beta],
            [gy],
            enable_double_backprop=True,
        )
        if not self._call.requires_grad:
            return None, ggamma, gbeta
        # A second backward from any of the three then takes part in all exchanges.
        return gx, *pseudo_connect(gx, ggamma, gbeta)


def _stack_ranks(payloads: list[bytes], like: np.ndarray) -> np.ndarray:
    """Return all ranks' two-row arrays, shaped like ``like``, as float64 (2, ranks, ...)."""
    flat = np.frombuffer(b"".join(payloads), like.dtype).astype(np.float64)
    return flat.reshape(len(payloads), *like.shape).swapaxes(0, 1)
