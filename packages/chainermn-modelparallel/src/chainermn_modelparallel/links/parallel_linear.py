"""Column- and row-parallel `Linear`: one matrix whose parts are on several ranks."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import Variable, backend, initializers
from chainer.backends import cuda

from chainermn_comm import CommunicatorBase, Sharding
from chainermn_comm.numbers import integer_between

from ..functions import (
    Inputs,
    Variables,
    apply_collective,
    array_specs,
    check_communicator,
    check_variable,
)
from .shardings import ShardedLink

_DRAWN = "the matrix, or bias, that was drawn for all ranks (seed them alike)"
_STEPS = (
    "the number of steps of its parameters (load the same checkpoint on all ranks after a "
    "step that only some of them made; where loss_scaling() adapts a scale, call "
    "chainermn.share_loss_scale)"
)

_RULE = "the update rule of its matrix (give all ranks one optimizer and its hyperparameters)"


class _ShardInitializer(chainer.Initializer):
    """Draws the whole array that one process would draw, and keeps this rank's shard."""

    def __init__(
        self, whole: Any, shape: list[int], axis: int, own: np.ndarray
    ) -> None:
        self._initializer = initializers._get_initializer(whole)
        super().__init__(getattr(self._initializer, "dtype", None))
        self._shape = shape
        self._axis = axis  # the axis that is divided
        self._own = own  # this rank's indexes along the axis
        self.checksum = 0  # the checksum of the whole array, once drawn

    def __call__(self, array: Any) -> None:
        """Fill a rank's shard."""
        xp = backend.get_array_module(array)
        whole = xp.empty(self._shape, array.dtype)
        self._initializer(whole)
        array[...] = whole.take(xp.asarray(self._own), self._axis)
        self.checksum = zlib.crc32(cuda.to_cpu(whole))


class _ParallelLinear(ShardedLink, L.Linear):
    """A :class:`chainer.links.Linear`; each rank keeps a part of it.

    ``_axis`` is the axis of ``W`` that is divided: 0 for the outputs, which divides ``b``,
    too; 1 for the inputs, with the whole of ``b`` on every rank.
    """

    _axis: int
    _is_drawn = True  # whether no parameters have been loaded or copied

    def __init__(
        self,
        in_size: int,
        out_size: int,
        comm: CommunicatorBase,
        nobias: bool,
        initialW: Any,
        initial_bias: Any,
    ) -> None:
        self.comm = check_communicator(comm)
        least = [1, 1]
        least[self._axis] = comm.size  # at least one input or output for each rank
        here = f"rank {comm.rank}:"
        shape = [
            integer_between(out_size, least[0], sys.maxsize, f"{here} out_size"),
            integer_between(in_size, least[1], sys.maxsize, f"{here} in_size"),
        ]
        shards = np.array_split(np.arange(shape[self._axis]), comm.size)
        own = shards[comm.rank]
        self._starts = [shard[0] for shard in shards]
        own_shape = list(shape)
        own_shape[self._axis] = len(own)
        own_out, own_in = own_shape
        if self._axis == 0 and initial_bias is not None:
            initial_bias = _ShardInitializer(initial_bias, shape[:1], 0, own)
        super().__init__(
            own_in,
            own_out,
            nobias,
            _ShardInitializer(initialW, shape, self._axis, own),
            initial_bias,
        )
        self.out_size, self.in_size = shape

    def _sharding(self, param: Any) -> Sharding:
        is_whole = self._axis == 1 and param is self.b
        return Sharding("replica" if is_whole else "shard", self.comm)

    def serialize(self, serializer: Any) -> None:
        """Save or load this rank's parameters as any link does (not collective).

        It raises the errors of any link. After a load, ranks no longer compare the
        arrays that they drew.
        """
        super().serialize(serializer)
        if isinstance(serializer, chainer.Deserializer):
            self._is_drawn = False

    def copyparams(self, link: Any, copy_persistent: bool = True) -> None:
        """Copy the parameters of ``link``, as any link does (not collective).

        ``copy_persistent`` says whether to copy persistent values, too. The method raises
        the errors of any link. Afterwards ranks no longer compare the arrays that they
        drew.
        """
        super().copyparams(link, copy_persistent)
        self._is_drawn = False

    def _apply(
        self, op: str, make_inputs: Callable[[], Inputs], part: str = ""
    ) -> Variables:
        """Apply an operation of a region; reports and errors name the link, or a part of it."""
        return apply_collective(self.comm, op, make_inputs, part + type(self).__name__)

    def _matrix(self, x: Any) -> Variable:
        """Return the argument of a call as a matrix; raise if it can't be one."""
        variable = check_variable("x", x, self.comm.rank)
        return F.reshape(variable, (*variable.shape[:1], self.in_size))

    def _inputs(self, x: Variable) -> Inputs:
        """Return inputs by which ranks compare the values of this link that must be equal."""
        # The initializer of a parameter that the user has replaced has no checksum.
        checksums = [
            self._is_drawn and getattr(param.initializer, "checksum", 0)
            for param in self.params()
        ]
        rule = self.W.update_rule
        signature = (
            *array_specs((x,)),
            (_DRAWN, *checksums),
            (_STEPS, getattr(rule, "t", 0)),
            (_RULE, type(rule).__name__, str(getattr(rule, "hyperparam", ""))),
        )
        replicas = [
            param for param in self.params() if self._sharding(param).kind == "replica"
        ]
        return Inputs((x,), signature=signature, replicas=tuple(replicas))


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose outputs are divided among ranks: each rank computes some columns of y.

    Each rank holds the rows of ``W`` and the elements of ``b`` for its columns. All
    ranks call the link with the same x (collective, like backward) and compute the same
    loss, which counts once. So gradients are those of one process with
    :class:`chainer.links.Linear`.

    Seed all ranks alike: then their shards form the matrix that one process would draw,
    and their random generators stay in step. Shards must not be averaged over ``comm``:
    a multi-node optimizer needs a communicator of ranks that hold the same shard
    (``comm.split``). A snapshot holds this rank's shard alone, so save and load a
    snapshot on each rank, with the same number of ranks. To take over a whole
    :class:`chainer.links.Linear`, pass its arrays as ``initialW`` and ``initial_bias``.

    Args:
        in_size: the number of inputs.
        out_size: the number of outputs of all ranks together, at least one per rank.
        comm: the communicator whose ranks divide the matrix.
        nobias: whether to leave out ``b``.
        initialW: initializer, number, or array of shape ``(out_size, in_size)`` for the
            whole matrix, as for :class:`chainer.links.Linear`.
        initial_bias: initializer, number, or array of shape ``(out_size,)`` for the
            whole of ``b``.
        gather_output: whether every rank gets all of y. Otherwise each rank gets its own
            columns, for a :class:`RowParallelLinear` with ``input_is_parallel``.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: a size is no positive integer, or is too small to be divided.
    """

    _axis = 0

    def __init__(
        self,
        in_size: int,
        out_size: int,
        comm: CommunicatorBase,
        nobias: bool = False,
        initialW: Any = None,
        initial_bias: Any = None,
        gather_output: bool = True,
    ) -> None:
        super().__init__(in_size, out_size, comm, nobias, initialW, initial_bias)
        self.gather_output = gather_output

    def forward(self, x: Any) -> Variable:
        """Return the linear map of x (collective).

        Args:
            x: a variable or an array of shape ``(N, in_size)``, the same on all ranks.
                Further axes are flattened into the second.

        Returns:
            A variable of shape ``(N, out_size)``, or only this rank's columns of it.

        Raises:
            TypeError: ``x`` is no variable or array.
            ValueError: ``x`` is a parameter that is not initialised.
            PeerError: another rank raised one of these.
            RankMismatchError: ranks have different shapes, dtypes or values of ``x``,
                have drawn different matrices, have made different numbers of steps, have
                different optimizers or hyperparameters, or call different links or
                functions; raised on all ranks.
            chainer.utils.type_check.InvalidType: the shape of ``x`` doesn't fit.
        """
        (whole,) = self._apply("copy_to_region", lambda: self._inputs(self._matrix(x)))
        y = super().forward(whole)
        if not self.gather_output:
            return y
        parts = self._apply(
            "gather_from_region", lambda: Inputs((y,)), "gather_output of "
        )
        return F.concat(parts, axis=1)


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose inputs are divided among ranks: each rank takes some columns of x.

    Each rank holds the columns of ``W`` for its inputs; ``b`` is the same on all ranks.
    The ranks' products are summed, and every rank gets all of y (collective, like
    backward). See :class:`ColumnParallelLinear` for seeds, optimizers and snapshots.

    Args:
        in_size: the number of inputs of all ranks together, at least one per rank.
        out_size: the number of outputs.
        comm: as for :class:`ColumnParallelLinear`.
        nobias: as for :class:`ColumnParallelLinear`.
        initialW: as for :class:`ColumnParallelLinear`.
        initial_bias: as for :class:`ColumnParallelLinear`.
        input_is_parallel: whether x has only this rank's columns, as a
            :class:`ColumnParallelLinear` without ``gather_output`` returns them.

    Raises:
        TypeError, ValueError: as for :class:`ColumnParallelLinear`.
    """

    _axis = 1

    def __init__(
        self,
        in_size: int,
        out_size: int,
        comm: CommunicatorBase,
        nobias: bool = False,
        initialW: Any = None,
        initial_bias: Any = None,
        input_is_parallel: bool = False,
    ) -> None:
        super().__init__(in_size, out_size, comm, nobias, initialW, initial_bias)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Any) -> Variable:
        """Return the linear map of x (collective).

        Args:
            x: a variable or an array of shape ``(N, in_size)``, the same on all ranks;
                with ``input_is_parallel``, only this rank's columns of it. Further axes
                are flattened into the second.

        Returns:
            A variable of shape ``(N, out_size)``, the same on all ranks.

        Raises:
            TypeError, ValueError, PeerError, RankMismatchError, InvalidType: as for
                :meth:`ColumnParallelLinear.forward`.
        """

        def make_parts() -> Inputs:
            matrix = self._matrix(x)
            parts = F.split_axis(matrix, self._starts[1:], 1, force_tuple=True)
            return Inputs(parts, signature=array_specs((matrix,)))

        def make_inputs() -> Inputs:
            columns = check_variable("x", own, self.comm.rank)
            return self._inputs(F.linear(columns, self.W))

        own = x
        if not self.input_is_parallel:
            (own,) = self._apply("split_to_region", make_parts, "x of ")
        (y,) = self._apply("reduce_from_region", make_inputs)
        if self.b is None:
            return y
        return F.bias(y, self.b)
