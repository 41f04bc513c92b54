"""Normalization by the mean and variance of all ranks' batches, as a function of Chainer."""

from __future__ import annotations

import functools
import struct
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
from chainer import Variable, backend
from chainer.backends import cuda

from chainermn_comm import CommunicatorBase

from .collective_ops import wanted
from .collectives import allreduce
from .consensus import Call, Form, View, agree
from .control_dependencies import empty_beside, go_on, pseudo_connect
from .ordered_function import Communication, unchecked

NAME = "MultiNodeBatchNormalization"
_COUNT = struct.Struct("<Q")


def normalize(
    comm: CommunicatorBase,
    x: Variable,
    gamma: Variable,
    beta: Variable,
    eps: float,
    axis: tuple[int, ...],
) -> tuple[Variable, Normalize]:
    """Normalize this rank's part of the batch (collective; so is backward, if an x needs it).

    Args:
        comm: the ranks that share the batch.
        x: floats of any shape; parts may be of different sizes, or empty.
        gamma: scale, of the shape that is left of x's without ``axis``; the same on all ranks.
        beta: what is added then; likewise.
        eps: added to the variance.
        axis: what is averaged over, in ascending order.

    Returns:
        The result, of x's shape and dtype, and the function, which knows the statistics.
    """
    node = Normalize(comm, eps, axis, wanted((x,))[0])
    inputs: tuple[Variable, ...] = (x, gamma, beta)
    if not any(each.requires_grad for each in inputs):
        inputs += (Variable(backend.get_array_module(x.array).empty(0, np.float32)),)
    return node.apply(inputs)[0], node


class Normalize(Communication):
    """Normalizes this rank's part of the batch (collective, with one exchange).

    Inputs: x, gamma, beta, and an empty leaf if none of them needs a gradient, since one may be
    needed elsewhere. Output: y.

    After ``forward``, the same on all ranks:

    Attributes:
        count: how many values each channel has, over all ranks.
        mean: of the whole batch; float32 or wider, of gamma's shape.
        var: likewise, without correction for the count.
    """

    def __init__(
        self, comm: CommunicatorBase, eps: float, axis: tuple[int, ...], wants: bool
    ) -> None:
        self._comm = comm
        self._eps = eps
        self._axis = axis
        self._wants = wants

    @property
    def label(self) -> str:
        return NAME

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self.retain_inputs((0, 1))
        x, gamma, beta = inputs[:3]
        self.empty = empty_beside(x)
        xp = self._xp
        self._dtype = _wide(x.dtype, gamma.dtype)
        # Where gamma's axes lie among x's.
        self._expander = tuple(
            None if axis in self._axis else slice(None) for axis in range(x.ndim)
        )
        expander = self._expander
        count = x.size // gamma.size if gamma.size else 0
        own = xp.zeros((2, *gamma.shape), self._dtype)  # mean of each channel; squares about it
        if count:
            x.sum(axis=self._axis, dtype=self._dtype, out=own[0, ...])
            own[0] /= count
        centred = xp.subtract(x, own[0][expander], dtype=self._dtype)
        xp.square(centred).sum(axis=self._axis, out=own[1, ...])
        self._combine(count, cuda.to_cpu(own))
        centred += (own[0] - self.mean)[expander]
        self._inv_std = 1 / xp.sqrt(self.var + self._dtype.type(self._eps))
        centred *= (self._inv_std * gamma)[expander]
        centred += beta[expander]
        return (centred.astype(x.dtype, copy=False),)

    def _combine(self, count: int, own: np.ndarray) -> None:
        """Set count, mean and variance of the whole batch, from each rank's in rank order.

        Deviations are from each rank's own mean, so that no digits are lost where the mean is
        large; the sums over ranks are taken in float64.
        """
        shape = own.shape[1:]
        view: View = (("operation", NAME), ("dtype and channels", Form(own.dtype, shape)))
        payload = _COUNT.pack(count) + own.tobytes()
        self._call: Call = agree(self._comm, view, wants=self._wants, payload=payload)
        counts = [_COUNT.unpack_from(row)[0] for row in self._call.payloads]
        self.count = sum(counts)
        means, squares = _floats([row[_COUNT.size :] for row in self._call.payloads], own)
        # Arrays without axes: NumPy takes longer for Python's numbers, and for axes of one.
        per_value = np.array(1 / max(self.count, 1))
        weights = np.array(float(counts[0]))  # nearly always that of all ranks
        if counts.count(counts[0]) < len(counts):
            weights = np.array(counts, np.float64).reshape(-1, *(1,) * len(shape))
        center = np.add.reduce(means * weights)
        center *= per_value
        means -= center
        means *= means
        means *= weights
        means += squares
        var = np.add.reduce(means)
        var *= per_value
        self.mean = self._xp.asarray(center.astype(own.dtype))
        self.var = self._xp.asarray(var.astype(own.dtype))

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        x, gamma = self.get_retained_inputs()
        gy = grad_outputs[0]
        if gy is None:
            gy = Variable(self._xp.zeros(x.shape, x.dtype), requires_grad=False)
        gradients: tuple[Variable | None, ...]
        if chainer.config.enable_backprop:
            (thread,) = go_on(grad_outputs[1:], (self.thread(),))
            gradients = self._differentiable(x, gamma, pseudo_connect(thread, gy))
        else:
            gradients = tuple(
                None if gradient is None else unchecked(gradient, True)
                for gradient in self._gradients(x.array, gamma.array, gy.array)
            )
        return tuple(gradients[index] if index < 3 else None for index in indexes)

    def _gradients(self, x: Any, gamma: Any, gy: Any) -> tuple[Any, Any, Any]:
        """Gradients of x, gamma and beta; of x only if some rank needs it."""
        xp, expander, dtype = self._xp, self._expander, self._dtype
        scale = gamma.astype(dtype, copy=False)
        x_hat = xp.subtract(x, self.mean[expander], dtype=dtype)
        x_hat *= self._inv_std[expander]
        gbeta = gy.sum(axis=self._axis, dtype=dtype)
        ggamma = (gy * x_hat).sum(axis=self._axis)
        gx = None
        if self._call.wanted:
            own = xp.empty((2, *gamma.shape), dtype)
            xp.multiply(scale, ggamma, out=own[0, ...])
            xp.multiply(scale, gbeta, out=own[1, ...])
            host = cuda.to_cpu(own)
            view: View = (("operation", f"backward of {NAME}"),)
            payload = host.tobytes()
            call = agree(self._comm, view, payload=payload, forward=self._call.number)
            means = np.add.reduce(_floats(call.payloads, host), axis=1)
            means *= 1 / max(self.count, 1)
            of_gamma, of_beta = xp.asarray(means.astype(dtype))
            x_hat *= -of_gamma[expander]
            x_hat += scale[expander] * gy
            x_hat -= of_beta[expander]
            x_hat *= self._inv_std[expander]
            gx = x_hat.astype(x.dtype, copy=False)
        # Arrays even where there is one channel without an axis, of which NumPy makes scalars.
        return gx, xp.asarray(ggamma, gamma.dtype), xp.asarray(gbeta, gamma.dtype)

    def _differentiable(
        self, x: Variable, gamma: Variable, gy: Variable
    ) -> tuple[Variable | None, Variable, Variable]:
        """The same gradients, made of functions that can be differentiated again."""
        axis, dtype, shape = self._axis, self._dtype, x.shape
        ones = tuple(1 if i in axis else n for i, n in enumerate(shape))
        per_value = 1 / max(self.count, 1)

        def spread(channels: Any) -> Variable:
            return F.broadcast_to(F.reshape(channels, ones), shape)

        def total(values: Variable) -> Variable:
            return allreduce(self._comm, F.sum(values, axis=axis) * per_value)

        wide, gy = F.cast(x, dtype), F.cast(gy, dtype)
        if self._call.wanted:
            centred = wide - spread(total(wide))
            inv_std = spread((total(centred * centred) + self._eps) ** -0.5)
        else:  # x is data on all ranks
            centred, inv_std = wide - spread(self.mean), spread(self._inv_std)
        x_hat = centred * inv_std
        gbeta, ggamma = F.sum(gy, axis=axis), F.sum(gy * x_hat, axis=axis)
        gx = None
        if self._call.wanted:
            scale = F.cast(gamma, dtype)
            sums = allreduce(self._comm, F.stack([scale * ggamma, scale * gbeta])) * per_value
            gx = spread(scale) * gy - (x_hat * spread(sums[0]) + spread(sums[1]))
            gx = F.cast(gx * inv_std, x.dtype)
            # Whichever of the three a rank goes on from, it comes by the exchanges above.
            ggamma, gbeta = pseudo_connect(sums, ggamma, gbeta)
        return gx, F.cast(ggamma, gamma.dtype), F.cast(gbeta, gamma.dtype)


@functools.lru_cache(maxsize=64)
def _wide(*dtypes: np.dtype) -> np.dtype:
    """What is computed in."""
    return np.result_type(*dtypes, np.float32)


def _floats(payloads: list[bytes], like: np.ndarray) -> np.ndarray:
    """Of each rank's array, like this one, each row beside the others', in float64."""
    numbers = np.frombuffer(b"".join(payloads), like.dtype)
    by_rank = numbers.reshape(len(payloads), *like.shape)
    beside: np.ndarray = by_rank.swapaxes(0, 1).astype(np.float64, order="C")
    return beside
