"""Column- and row-parallel `Linear`: one matrix whose parts are on several ranks."""

from __future__ import annotations

import math
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
from chainer import Variable

from chainermn_comm import CommunicatorBase
from chainermn_comm.numbers import as_integer

from ..functions import (
    check_communicator,
    check_variable,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    split_to_region,
)


class _ParallelLinear(chainer.Link):
    """A :class:`chainer.links.Linear`; each rank keeps a part of it.

    ``_axis`` is the axis of ``W`` that is divided: 0 for the outputs, 1 for the inputs.
    """

    _axis: int
    W: Any
    b: Any

    def __init__(
        self, in_size: int, out_size: int, comm: CommunicatorBase, *initial: Any
    ) -> None:
        check_communicator(comm)
        super().__init__()
        self.comm = comm
        self.in_size, self.out_size = in_size, out_size
        self._initial = initial  # nobias, initialW, initial_bias
        for axis, name, size in ((0, "out_size", out_size), (1, "in_size", in_size)):
            least, reason = (
                (comm.size, ", one for each rank") if axis == self._axis else (1, "")
            )
            number = as_integer(size)
            if number is None or number < least:
                raise ValueError(
                    f"rank {comm.rank}: {name} must be an integer of at least {least}{reason}, got "
                    f"{size!r}"
                )
        # The whole matrix is drawn, so that shards are those of what one process would
        # draw.
        whole = L.Linear(in_size, out_size, *initial)
        ends = self._shard_ends()
        shard, everything = slice([0, *ends][comm.rank], ends[comm.rank]), slice(None)
        rows, columns = (shard, everything) if self._axis == 0 else (everything, shard)
        with self.init_scope():
            self.W = chainer.Parameter(whole.W.array[rows, columns].copy())
            self.b = (
                None
                if whole.b is None
                else chainer.Parameter(whole.b.array[rows].copy())
            )

    def copy(self, mode: str = "share") -> Any:
        """Return a copy on the same communicator; ``mode="init"`` draws the whole matrix anew."""
        if mode != "init":
            return super().copy(mode)
        duplicate = super().copy("copy")
        fresh = type(self)(self.in_size, self.out_size, self.comm, *self._initial)
        fresh.to_device(self.device)
        duplicate.copyparams(fresh)
        return duplicate

    def _shard_ends(self) -> list[int]:
        """Return where each rank's shard ends; the first shards hold the remainder, one each."""
        each, more = divmod(
            self.in_size if self._axis else self.out_size, self.comm.size
        )
        return [each * rank + min(rank, more) for rank in range(1, self.comm.size + 1)]

    def _check_input(self, x: Any, columns: int) -> Variable:
        rank = self.comm.rank
        x = check_variable("x", x, rank)
        fits = x.array is not None and x.ndim > 1 and math.prod(x.shape[1:]) == columns
        if not fits or x.dtype != self.W.dtype:
            uninitialised = x.array is None
            got = (
                "a parameter that is not initialised"
                if uninitialised
                else f"{x.dtype} {x.shape}"
            )
            raise ValueError(
                f"rank {rank}: x must be a matrix of {columns} columns of {self.W.dtype}, got {got}"
            )
        return x if x.ndim == 2 else F.reshape(x, (len(x), columns))


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
        x = copy_to_region(self.comm, lambda: self._check_input(x, self.in_size))
        y = F.linear(x, self.W, self.b)
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
                self._shard_ends(),
            )
        y = reduce_from_region(
            self.comm, lambda: F.linear(self._check_input(x, self.W.shape[1]), self.W)
        )
        return y if self.b is None else y + F.broadcast_to(self.b, y.shape)
