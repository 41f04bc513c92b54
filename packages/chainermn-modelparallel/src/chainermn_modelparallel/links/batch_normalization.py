"""`MultiNodeBatchNormalization`: batch normalization of a batch that several ranks share."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.links as L
import numpy as np
from chainer import Variable, backend

from chainermn_comm import CommunicatorBase

from ..functions import (
    SyncBatchNormFunction,
    check_communicator,
    check_variable,
    get_communication_backend,
    sync_batch_norm,
)


class MultiNodeBatchNormalization(L.BatchNormalization):
    """Batch normalization by the statistics of all ranks' batches together.

    It gives what :class:`chainer.links.BatchNormalization` gives for the ranks' batches
    put together, whose parts may be of different sizes, or empty. The running
    statistics are the same on all ranks, and those of the whole batch. Parameters,
    persistent values and their names are those of
    :class:`chainer.links.BatchNormalization`, so snapshots of one load into the other.

    While ``chainer.config.train`` is true, calling the link is collective, and so is
    backward if any rank's input needs a gradient; each takes one exchange. Then
    backward has to run on every rank, on those with an empty batch too. An input gets
    the gradient of the sum of all ranks' losses. ``gamma`` and ``beta`` get this rank's
    share, which :func:`create_multi_node_optimizer` averages as it does the others.
    Otherwise the link uses its running statistics, and no communication.

    Args:
        size: number of channels, or their shape if it has more axes; None if ``axis``
            is given.
        comm: the communicator; all its ranks take part.
        decay: how much of the running statistics stays at each call.
        eps: added to the variance.
        dtype: of the parameters and running statistics; None for
            ``chainer.config.dtype`` (float32 where nothing is configured, and for
            ``mixed16``), as Chainer's own link has it. Statistics of a batch are
            computed in float32 or wider.
        use_gamma: whether to scale the result by a parameter.
        use_beta: whether to add a parameter to the result.
        initial_gamma: initializer, number or array; 1 by default.
        initial_beta: likewise; 0 by default.
        communication_backend: ``"auto"``, ``"mpi"`` or ``"nccl"``. All go by the
            communicator's ``handshake``, through host memory: statistics are small.
            ``"nccl"`` demands inputs on a GPU.
        axis: what is averaged over, as for :class:`chainer.links.BatchNormalization`.
        initial_avg_mean: likewise.
        initial_avg_var: likewise.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: there is no such ``communication_backend``.
    """

    def __init__(
        self,
        size: Any,
        comm: CommunicatorBase,
        decay: float = 0.9,
        eps: float = 2e-5,
        dtype: Any = None,
        use_gamma: bool = True,
        use_beta: bool = True,
        initial_gamma: Any = None,
        initial_beta: Any = None,
        communication_backend: str = "auto",
        axis: Any = None,
        initial_avg_mean: Any = None,
        initial_avg_var: Any = None,
    ) -> None:
        check_communicator(comm)
        get_communication_backend(comm, communication_backend)
        scaling = (use_gamma, use_beta, initial_gamma, initial_beta)
        running = (initial_avg_mean, initial_avg_var)
        super().__init__(size, decay, eps, dtype, *scaling, axis, *running)
        self.comm = comm
        self.communication_backend = communication_backend

    def forward(self, x: Any, finetune: bool = False) -> Variable:
        """Normalize this rank's part of the batch (collective while training).

        Args:
            x: a variable or an array of floats, of shape ``(N, size, ...)``, or what
                ``axis`` says; ``N`` may differ between ranks, and be 0.
            finetune: accumulate running statistics with equal weights, as
                :class:`chainer.links.BatchNormalization` does.

        Returns:
            A variable of x's shape and dtype.

        Raises:
            TypeError: ``x`` is no variable or array of floats, or on another device.
            ValueError: its shape doesn't fit, or it is not on a GPU as ``"nccl"``
                demands.
            PeerError: another rank raised one of these.
            RankMismatchError: on all ranks, when they call something else, or channels
                differ.
        """
        if not chainer.config.train:
            return super().forward(x, finetune=finetune)
        y, node = sync_batch_norm(self.comm, self.eps, lambda: self._make_inputs(x))
        if not chainer.config.in_recomputing:
            self._update_running_statistics(node, finetune)
        return y

    def _make_inputs(
        self, x: Any
    ) -> tuple[Variable, Variable, Variable, tuple[int, ...]]:
        x = self._check_input(x)
        axis = self.axis
        if axis is None:  # channels are from the axis after the first on
            axis = (0, *range(self.avg_mean.ndim + 1, x.ndim))
        shape = tuple(n for i, n in enumerate(x.shape) if i not in axis)
        if self.avg_mean is None and x.ndim > max(axis):
            self._initialize_params(shape)
        known = self.avg_mean
        if known is None or x.ndim <= max(axis) or shape != known.shape:
            channels = "channels" if known is None else f"the channels {known.shape}"
            raise ValueError(
                f"rank {self.comm.rank}: x of shape {x.shape} doesn't have {channels} beside the "
                f"axes {axis}"
            )
        gamma = self._get_gamma()[0] if self.gamma is None else self.gamma
        beta = self._get_beta()[0] if self.beta is None else self.beta
        return x, chainer.as_variable(gamma), chainer.as_variable(beta), axis

    def _check_input(self, x: Any) -> Variable:
        rank = self.comm.rank
        x = check_variable("x", x, rank)
        if x.array is None or x.dtype.kind != "f":
            raise TypeError(f"rank {rank}: x must be an array of floats")
        module = backend.get_array_module(x.array)
        if self.communication_backend == "nccl" and module is np:
            raise ValueError(
                f'rank {rank}: communication_backend="nccl" needs inputs on a GPU, got a NumPy '
                'array; use "auto" or "mpi"'
            )
        if module is not self.xp:
            raise TypeError(
                f"rank {rank}: x is an array of {module.__name__}, but the link's are of "
                f"{self.xp.__name__}; move one of them with to_device"
            )
        return x

    def _update_running_statistics(
        self, node: SyncBatchNormFunction, finetune: bool
    ) -> None:
        """Average the batch's statistics into the running ones; an empty batch changes nothing."""
        if node.count == 0:
            return
        decay = self.decay
        if finetune:
            self.N += 1
            decay = 1.0 - 1.0 / self.N
        unbiased = node.count / max(node.count - 1.0, 1.0)
        shape = self.avg_mean.shape
        with chainer.using_device(self.device):
            self.avg_mean *= decay
            self.avg_mean += (1 - decay) * node.mean.reshape(shape)
            self.avg_var *= decay
            self.avg_var += (1 - decay) * (node.var * unbiased).reshape(shape)
