"""Column- and row-parallel `Linear`: one matrix whose parts are on several ranks."""

from __future__ import annotations

import math
import zlib
from typing import Any

import chainer
import chainer.functions as F
from chainer import Variable, backend, initializers
from chainer.backends import cuda

from chainermn_comm import CommunicatorBase, Sharding
from chainermn_comm.numbers import as_integer

from ..functions import (
    Inputs,
    array_specs,
    check_communicator,
    check_variable,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    split_to_region,
)
from .shardings import ShardedLink

_DRAWN = "the matrix that was drawn for all ranks (seed them alike)"


class _ShardInitializer(chainer.Initializer):
    """Draws a whole array and keeps a part of it: that of what one process would draw."""

    def __init__(
        self, whole: Any, shape: tuple[int, ...], part: tuple[slice, ...]
    ) -> None:
        self._initializer = initializers._get_initializer(whole)
        super().__init__(getattr(self._initializer, "dtype", None))
        self._shape = shape
        self._part = part
        self.checksum = 0  # of the whole array that was drawn

    def __call__(self, array: Any) -> None:
        """Fill a rank's part."""
        xp = backend.get_array_module(array)
        whole = xp.empty(self._shape, array.dtype)
        self._initializer(whole)
        array[...] = whole[self._part]
        self.checksum = zlib.crc32(cuda.to_cpu(whole))


class _ParallelLinear(ShardedLink):
    """A :class:`chainer.links.Linear`; each rank keeps a part of it.

    ``_axis`` is the axis of ``W`` that is divided: 0 for the outputs, 1 for the inputs.
    ``_axis_of_bias`` is that of ``b``, None if every rank has the whole of it.
    """

    _axis: int
    _axis_of_bias: int | None
    W: Any
    b: Any

    def __init__(
        self,
        in_size: int,
        out_size: int,
        comm: CommunicatorBase,
        nobias: bool,
        initialW: Any,
        initial_bias: Any,
    ) -> None:
        check_communicator(comm)
        super().__init__()
        self.comm = comm
        self.in_size = self._check_size("in_size", in_size, axis=1)
        self.out_size = self._check_size("out_size", out_size, axis=0)
        with self.init_scope():
            self.W = self._draw(initialW, (self.out_size, self.in_size), self._axis)
            self.b = None
            if not nobias:
                bias = 0 if initial_bias is None else initial_bias
                self.b = self._draw(bias, (self.out_size,), self._axis_of_bias)

    def _check_size(self, name: str, size: Any, axis: int) -> int:
        least = self.comm.size if axis == self._axis else 1
        number = as_integer(size)
        if number is None or number < least:
            raise ValueError(
                f"rank {self.comm.rank}: {name} must be an integer of at least {least} (the "
                f"divided size: one for each rank), got {size!r}"
            )
        return number

    def _draw(self, whole: Any, shape: tuple[int, ...], axis: int | None) -> Any:
        """Return a parameter: this rank's part of an array, along the axis if there is one."""
        part = [slice(size) for size in shape]
        if axis is not None:
            bounds = self._shard_bounds()
            part[axis] = slice(*bounds[self.comm.rank : self.comm.rank + 2])
        initializer = _ShardInitializer(whole, shape, tuple(part))
        sizes = [each.stop - (each.start or 0) for each in part]
        return chainer.Parameter(initializer, tuple(sizes))

    def _shard_bounds(self) -> list[int]:
        """Return where shards begin, and the end; the first hold the remainder, one each."""
        size = self.out_size if self._axis == 0 else self.in_size
        each, more = divmod(size, self.comm.size)
        return [each * rank + min(rank, more) for rank in range(self.comm.size + 1)]

    def _sharding(self, param: Any) -> Sharding:
        is_whole = param is self.b and self._axis_of_bias is None
        return Sharding("replica" if is_whole else "shard", self.comm)

    def _check_input(self, x: Any, columns: int) -> Variable:
        x = check_variable("x", x, self.comm.rank)
        got = "a parameter that is not initialised"
        if x.array is not None:
            got = f"{x.dtype} {x.shape}"
            fits = x.ndim > 1 and math.prod(x.shape[1:]) == columns
            if fits and x.dtype == self.W.dtype:
                return F.reshape(x, (len(x), columns))
        raise ValueError(
            f"rank {self.comm.rank}: x must be a matrix of {columns} columns of "
            f"{self.W.dtype}, got {got}"
        )

    def _initializers(self) -> list[_ShardInitializer]:
        """Return those of the parameters that this link has drawn."""
        made = [param.initializer for param in self.params()]
        return [each for each in made if isinstance(each, _ShardInitializer)]

    def serialize(self, serializer: Any) -> None:
        """Save or load this rank's parameters, and raise what any link does (not collective).

        Values that were drawn before a load are no longer compared between ranks.
        """
        super().serialize(serializer)
        if isinstance(serializer, chainer.Deserializer):
            for initializer in self._initializers():
                initializer.checksum = 0

    def _inputs(self, x: Variable) -> Inputs:
        """Return inputs that let ranks compare what they must have alike in this link."""
        checksums = [initializer.checksum for initializer in self._initializers()]
        replicas = []
        if self.b is not None and self._axis_of_bias is None:
            replicas = [self.b.array]
        return Inputs(
            (x,),
            signature=(*array_specs((x,)), (_DRAWN, *checksums)),
            replicas=tuple(replicas),
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose outputs are divided among the ranks: each has some columns of y.

    Rank r holds the rows of ``W``, and the elements of ``b``, that make its columns.
    All ranks call the link with the same x (collective, as is backward) and compute the
    same loss, which counts once: gradients are those of one process with
    :class:`chainer.links.Linear`.

    Seed all ranks alike: then the parts are those of the matrix that one process would
    draw, and the random numbers of the ranks stay in step. The parts must not be
    averaged over ``comm``: a multi-node optimizer needs a communicator of ranks that
    hold the same part (``comm.split``). A snapshot holds this rank's part alone, so
    save and load one for each rank, with the same number of ranks; to take over a whole
    :class:`chainer.links.Linear`, give its arrays as ``initialW`` and ``initial_bias``.

    Args:
        in_size: number of inputs.
        out_size: number of outputs of all ranks together, at least one for each.
        comm: the communicator whose ranks divide the matrix.
        nobias: without ``b``.
        initialW: initializer, number, or array of shape ``(out_size, in_size)``, of the
            whole matrix; as for :class:`chainer.links.Linear`.
        initial_bias: likewise, of shape ``(out_size,)``.
        gather_output: whether every rank gets all of y. Without it, a
            :class:`RowParallelLinear` with ``input_is_parallel`` can take this rank's
            columns.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: a size is none, or too small to be divided.
    """

    _axis = 0
    _axis_of_bias = 0

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
            x: a variable or an array of shape ``(N, in_size)``, of the parameters'
                dtype, the same on all ranks. Further axes are flattened into the
                second.

        Returns:
            A variable of shape ``(N, out_size)``, or with this rank's columns only.

        Raises:
            TypeError: ``x`` is no variable or array.
            ValueError: its shape or dtype is another.
            PeerError: another rank raised one of these.
            RankMismatchError: on all ranks, when shapes differ or they call something
                else.
        """
        whole = copy_to_region(
            self.comm,
            lambda: self._inputs(self._check_input(x, self.in_size)),
        )
        y = F.linear(whole, self.W, self.b)
        return gather_from_region(self.comm, y) if self.gather_output else y


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose inputs are divided among the ranks: each takes some columns of x.

    Rank r holds the columns of ``W`` that take its inputs; ``b`` is the same on all
    ranks. The ranks' products are summed, and all get the whole of y (collective, as is
    backward). See :class:`ColumnParallelLinear` for seeds, optimizers and snapshots.

    Args:
        in_size: number of inputs of all ranks together, at least one for each.
        out_size: number of outputs.
        comm: as for :class:`ColumnParallelLinear`.
        nobias: as there.
        initialW: as there.
        initial_bias: as there.
        input_is_parallel: whether x is this rank's columns alone, as a
            :class:`ColumnParallelLinear` without ``gather_output`` gives them.

    Raises:
        TypeError, ValueError: as for :class:`ColumnParallelLinear`.
    """

    _axis = 1
    _axis_of_bias = None

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
            x: a variable or an array of the parameters' dtype: of shape ``(N,
                in_size)`` and the same on all ranks, or with this rank's columns if
                ``input_is_parallel``. Further axes are flattened into the second.

        Returns:
            A variable of shape ``(N, out_size)``, the same on all ranks.

        Raises:
            TypeError, ValueError, PeerError, RankMismatchError: as for
                :meth:`ColumnParallelLinear.forward`.
        """
        if not self.input_is_parallel:
            x = split_to_region(
                self.comm,
                lambda: self._check_input(x, self.in_size),
                self._shard_bounds()[1:],
            )

        def make_inputs() -> Inputs:
            columns = self._check_input(x, self.W.shape[1])
            return self._inputs(F.linear(columns, self.W))

        y = reduce_from_region(self.comm, make_inputs)
        return y if self.b is None else y + F.broadcast_to(self.b, y.shape)
