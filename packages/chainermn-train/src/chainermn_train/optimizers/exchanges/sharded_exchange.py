"""Each rank steps its parts of the parameters alone (ZeRO, stage 1), on CPUs.

The parameters lie in a file that all ranks of a machine map. A rank writes its gradients
to the file, too, but for its own parts, and ranks agree. Each takes the means of its
parts, steps along them, and writes the new values, which all ranks see. Between steps a
rank has the state of its parts, and update rules have none.

Over several machines, one rank of each adds up its machine's gradients for a part, and
sends the sums to the part's rank. That rank sends the new values back, by default while
the next forward computes.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from chainermn_comm import CommunicatorBase, Reducer, patient_waits
from chainermn_comm.numbers import accumulator, sum_rows

from ...background_thread import BackgroundThread, raise_if_any
from ...collective_errors import allgather_checked, raise_together
from ...profiling import region
from ...slots import entries_of, named_parameters, scaling_of
from ..agreement import OPERATION
from ..block_updates import step_in_blocks
from ..gradient_set import multiply_gradients, present_gradient
from ..parameter_set import ParameterSet
from .awaited_array import await_values, stop_waiting
from .buckets import bounds_of
from .gradient_exchange import GradientExchange, make_channel
from .parameter_file import Form, ParameterFile
from .shard_hooks import checked_hooks, hooks_of_shards
from .shards import (
    Shard,
    State,
    cut,
    merge,
    part_of,
    set_state,
    state_of,
    stepping_shards,
)

_NUMBER = np.dtype("<u4")  # of a parameter, among those that have values
# What is added up for a rank's parts, by the numbers of parameters with gradients.
Terms: TypeAlias = dict[int, Sequence[np.ndarray]]
# What a rank says before the numbers of its missing gradients.
_IN_FILE = b"\0"  # its parameters and gradients are in the file
_ELSEWHERE = b"\1"


class ShardedExchange(GradientExchange):
    """Each update steps along the means of its own gradients, each rank for its parts."""

    is_sharded = True

    def __init__(
        self, communicator: CommunicatorBase, zero_fill: bool, overlaps: bool
    ) -> None:
        """Exchange on ``communicator``; not collective.

        With ``overlaps`` values go to other machines while ranks compute.
        """
        super().__init__(communicator, zero_fill)
        self._overlaps = overlaps
        self._file: Any = None  # the `ParameterFile`, once there is one
        # Those of all parameters that had values when they came into the file.
        self._shards: list[Shard] = []
        # Whether all ranks have the same parameters since then.
        self._are_in_file = False
        # Whether update rules have the states of which all ranks have parts.
        self._are_gathered = False
        self._gradients: list[Any] = []  # flat, of these parameters; None if missing

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        twin._file = None
        twin._are_in_file = False
        twin._shards = copy.deepcopy(self._shards, memo)
        return twin

    def make_reducer(self) -> ShardReducer:
        return ShardReducer(self._communicator, super().make_reducer())

    def reducer_of(self, params: ParameterSet, scale: float | None) -> Reducer:
        reducer = self.make_reducer()
        with raise_together(self._communicator.handshake, OPERATION, meet=False):
            own = _ELSEWHERE
            if self._are_in_file:
                self.has_changed = not self._has_those_of(params)
                if not self.has_changed:
                    own = _IN_FILE
                    self._write_gradients()
            missing = []
            for number, (name, param) in enumerate(_with_values(params)):
                text = "a gradient"
                if present_gradient(param) is None:
                    missing.append(number)
                    text = "no gradient"
                if not self._zero_fill:
                    reducer.entries.append(("parameter", f"{name}: {text}"))
            reducer.own = own + np.array(missing, _NUMBER).tobytes()
        self._reducer = reducer
        return reducer

    def finish(self, params: ParameterSet, scale: float | None, factor: float) -> bool:
        reducer = self._reducer
        handshake = self._communicator.handshake
        self.cancel()
        self.may_have_stepped = False
        with region("communication"):
            if any([row.startswith(_ELSEWHERE) for row in reducer.rows]):
                self._put_into_file(params)
            machines = self._file.machines
            missing = reducer.missing()
            with raise_together(handshake, OPERATION, meet=False):
                terms = {rank: self._terms(rank, missing) for rank in machines.served}
            if machines.are_several:
                terms = self._sums_of_machines(terms)
            with raise_together(handshake, OPERATION, meet=False):
                self._take_means(terms[self._communicator.rank], scale)
                if factor != 1:
                    multiply_gradients([it.piece for it in self._shards], factor)
        return True

    def step(self, optimizer: Any, params: ParameterSet) -> None:
        handshake = self._communicator.handshake

        def agree(optimizer: Any) -> None:
            """Go on if all ranks' hooks have succeeded, without a step if gradients overflow.

            Hooks must have equal numbers. No parameter would tell of a difference, since
            all ranks get what each has stepped.
            """
            overflows = bool(getattr(optimizer, "_loss_scaling_isnan", False))
            rows = handshake(OPERATION, entries_of(facts), payload=bytes([overflows]))
            if any(map(any, rows)):
                optimizer._loss_scaling_isnan = True
                optimizer._loss_scaling_isnan_ever = True
            self.may_have_stepped = True

        scaling = scaling_of(optimizer)
        # At the end all ranks of a machine have written their parts.
        with raise_together(handshake, OPERATION):
            facts = checked_hooks(optimizer, params)
            hooks = hooks_of_shards(self._communicator, optimizer)
            hooks["all ranks agree"] = agree
            try:
                with stepping_shards(optimizer, self._shards, hooks):
                    step_in_blocks(optimizer, [shard.piece for shard in self._shards])
            except BaseException:
                if not self.may_have_stepped:  # this rank may have seen an overflow
                    vars(optimizer).update(scaling)
                raise
        if self._file.machines.are_several:
            self._send_values()

    def cancel(self) -> None:
        super().cancel()
        self.has_changed = False

    def drop(self) -> None:
        super().drop()
        for shard in self._shards:
            stop_waiting(shard.param)
        self._are_in_file = False

    # States.

    def forget_states(self) -> None:
        self._shards = []

    def gather_states(self, optimizer: Any) -> None:
        named = named_parameters(optimizer.target)

        def own() -> dict[str, State]:
            raise_if_any(self.failure())  # a checkpoint has parameters, too
            return {name: self._state_of(param) for name, param in named}

        rows = allgather_checked(self._communicator, OPERATION, own)
        for name, param in named:
            parts = [row.get(name) for row in rows]
            if all(parts) and not state_of(param):
                set_state(param, merge(parts, param.shape))

    def refuse_parts(self) -> None:
        if any([it.state for it in self._shards]) and not self._are_gathered:
            raise RuntimeError(
                "each rank has a part of the optimizer's state (sharded=True): save by "
                "create_multi_node_checkpointer or multi_node_snapshot, whose checkpoints "
                "have the whole state; or the model alone"
            )

    @contextmanager
    def whole_states(self, optimizer: Any) -> Iterator[None]:
        lacking = [it.param for it in self._shards if not state_of(it.param)]
        self.gather_states(optimizer)
        self._are_gathered = True
        try:
            yield
        finally:
            self._are_gathered = False
            for param in lacking:
                set_state(param, {})

    # The file.

    def _part_of(self, param: Any) -> slice:
        return part_of(param.size, self._communicator.rank, self._communicator.size)

    def _state_of(self, param: Any) -> State:
        """Return the state of this rank's part: of a state that was loaded, or as it stepped."""
        state = state_of(param)
        if state and param.is_initialized:
            return cut(state, self._part_of(param))
        for shard in self._shards:
            if shard.param is param and shard.piece.update_rule is param.update_rule:
                return shard.state
        return state

    def _has_those_of(self, params: ParameterSet) -> bool:
        """Return whether the model and its update rules are as the last step left them."""
        named = _with_values(params)
        if len(named) != len(self._shards):
            return False
        for shard, (_, param) in zip(self._shards, named, strict=True):
            if (
                shard.param is not param
                or shard.array is not param.array
                or state_of(param)
            ):
                return False
        return not self._file.has_own_writes()

    def _put_into_file(self, params: ParameterSet) -> None:
        """Let all ranks have their parameters and gradients in the file (collective).

        Each rank gives its parts of values and states.
        """
        communicator = self._communicator
        named = _with_values(params)
        with raise_together(communicator.handshake, OPERATION) as call:
            # Copies: an array may be a view of the file, also of another parameter, and
            # no rank writes there before all have read.
            parts = []
            names: dict[int, str] = {}  # of parameters, by their arrays
            for name, param in named:
                if type(param.array) is not np.ndarray or param.dtype.kind != "f":
                    raise ValueError(
                        f"{name} has no real numbers in host memory (NumPy's arrays), as "
                        "sharded=True needs"
                    )
                other = names.setdefault(id(param.array), name)
                if other != name:
                    raise ValueError(
                        f"{name} has the same array as {other}, as a copy by link.copy() has: with "
                        "sharded=True let both links have the same parameter"
                    )
                parts.append(param.array.reshape(-1)[self._part_of(param)].copy())
            forms = [Form(name, it.dtype, it.shape) for name, it in named]
            call.signature = [("parameter", *form) for form in forms]
        if self._file is None or self._file.forms != forms:
            self._file = ParameterFile(communicator, forms)
        file = self._file
        with raise_together(communicator.handshake, OPERATION):
            shards = []
            for number, (_, param) in enumerate(named):
                part = self._part_of(param)
                values = file.parameters[number][part]
                values[...] = parts[number]
                state = self._state_of(param)
                shards.append(Shard(param, file.arrays[number], part, values, state))
            self._shards = shards
            self._write_gradients()
        if file.machines.are_several:
            self._exchange_values(communicator, slice(None))
        with raise_together(communicator.handshake, OPERATION, meet=False):
            file.drop_own_writes()
            for shard in shards:
                set_state(shard.param, {})
                shard.param.array = shard.array
            self._are_in_file = True

    # Gradients.

    def _write_gradients(self) -> None:
        """Write the other ranks' parts of this rank's gradients."""
        places = self._file.gradients[self._communicator.rank]
        self._gradients = []
        for shard, place in zip(self._shards, places, strict=True):
            grad = present_gradient(shard.param)
            if grad is not None:
                grad = np.ascontiguousarray(grad).reshape(-1)
                place[: shard.part.start] = grad[: shard.part.start]
                place[shard.part.stop :] = grad[shard.part.stop :]
            self._gradients.append(grad)

    def _terms(self, owner: int, missing: list[set[int]]) -> Terms:
        """Return the machine's gradients of a rank's parts, zeros for those that are missing."""
        terms: Terms = {}
        for number in range(len(self._shards)):
            if all([number in lacks for lacks in missing]):
                continue
            rows = []
            for rank, flat in self._file.gradients.items():
                part = part_of(flat[number].size, owner, len(missing))
                row = flat[number][part]
                if number in missing[rank]:
                    row = np.zeros_like(row)
                elif rank == self._communicator.rank:
                    row = self._gradients[number][part]
                rows.append(row)
            terms[number] = rows
        return terms

    def _take_means(self, terms: Terms, scale: float | None) -> None:
        """Give this rank's parts the means of all ranks' gradients."""
        for number, shard in enumerate(self._shards):
            piece = shard.piece
            piece.cleargrad()
            piece._loss_scale = None
            if number in terms:
                mean = self._file.means[number][shard.part]
                with np.errstate(all="ignore"):
                    sum_rows(terms[number], mean, self._communicator.size)
                piece.grad = mean
                piece._loss_scale = scale
        self._gradients = []

    # Over several machines.

    def _sums_of_machines(self, terms: dict[int, Terms]) -> dict[int, Terms]:
        """Return the sums of each machine's gradients, for this rank's parts (collective)."""
        sums = {}
        with raise_together(self._communicator.handshake, OPERATION):
            for owner, own in terms.items():
                sums[owner] = [_sum(rows) for rows in own.values()]
        received = _exchange(self._communicator, sums)
        rows = zip(*[received[it] for it in self._file.machines.partners], strict=True)
        rank = self._communicator.rank
        return {rank: dict(zip(terms[rank], rows, strict=True))}

    def _send_values(self) -> None:
        """Exchange values with other machines, perhaps while this rank computes (collective).

        Then reading a parameter waits until all its values are there. If they can't come,
        it raises, until gradients are dropped because all ranks get rank 0's state.
        """
        if self.channel is None:
            self.channel = make_channel(self._communicator, None)
        channel = self.channel
        bounds = bounds_of(self._file.parameters)
        buckets: list[tuple[slice, Future[None]]] = [
            (slice(*each), Future()) for each in pairwise(bounds)
        ]

        def exchange(wait_requested: threading.Event) -> None:
            try:
                with patient_waits(wait_requested):
                    for bucket, arrival in buckets:
                        self._exchange_values(channel, bucket)
                        arrival.set_result(None)
            except BaseException as error:
                for _, arrival in buckets:
                    if not arrival.done():
                        arrival.set_exception(error)
                raise

        self._thread = BackgroundThread(exchange)
        if not self._overlaps:
            self.wait()
            return
        self._thread.start()
        for bucket, arrival in buckets:
            for shard in self._shards[bucket]:
                await_values(shard.param, arrival)

    def _exchange_values(self, communicator: CommunicatorBase, bucket: slice) -> None:
        """Exchange the values of a bucket of parameters with other machines (collective)."""
        machines = self._file.machines
        values = [shard.values for shard in self._shards[bucket]]
        sent = dict.fromkeys(machines.partners, values)
        received = _exchange(communicator, sent)
        with raise_together(communicator.handshake, OPERATION):
            for owner in machines.served:
                places = self._file.parameters[bucket]
                for place, new in zip(places, received[owner], strict=True):
                    place[part_of(place.size, owner, len(received))] = new


def _exchange(
    communicator: CommunicatorBase, sent: dict[int, list[np.ndarray]]
) -> tuple[Sequence[np.ndarray], ...]:
    """Return what each rank has sent to this rank (collective)."""
    ranks = range(communicator.size)
    return communicator.alltoall([sent.get(rank, []) for rank in ranks])


def _sum(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum in the dtype in which numbers are added up."""
    total = np.empty(rows[0].shape, accumulator(rows[0].dtype))
    with np.errstate(all="ignore"):
        sum_rows(rows, total)
    return total


class ShardReducer(Reducer):
    """Lets ranks agree on gradients in the file.

    Attributes:
        own: what this rank says of them; nothing if there are none.
        entries: facts about its gradients that must be equal on all ranks.
        rows: what each rank says.
    """

    def __init__(self, communicator: CommunicatorBase, reducer: Reducer) -> None:
        """Agree on ``communicator`` by a ``reducer`` without gradients."""
        self._communicator = communicator
        self._reducer = reducer
        self.own = b""
        self.entries: list[tuple[str, str]] = []
        self.rows: list[bytes] = []

    def agree(
        self, signature: Iterable[tuple[Any, ...]] = (), payload: bytes = b""
    ) -> list[bytes]:
        rows = self._reducer.agree(signature, payload + self.own)
        length = len(payload)
        self.rows = [row[length:] for row in rows]
        if self.entries and all(self.rows) and len(set(self.rows)) > 1:
            self._communicator.handshake(OPERATION, self.entries)
        return [row[:length] for row in rows]

    def missing(self) -> list[set[int]]:
        """Return the numbers of the parameters of which each rank has no gradient."""
        return [set(np.frombuffer(row[1:], _NUMBER).tolist()) for row in self.rows]


def _with_values(params: ParameterSet) -> list[tuple[str, Any]]:
    """Return the names and parameters that have values."""
    return [each for each in params.namedparams() if each[1].is_initialized]
