"""The communicators of ChainerMN: collective communication of arrays, objects and gradients."""

from _chainermn_startup import register as _register_finder

from .communicator import CommunicatorBase
from .creation import create_communicator
from .errors import CommunicationError, FinalizedError, PeerError, RankMismatchError
from .faults import install_if_forced as _install_if_forced
from .mpi_start import keep_workers_from_starting_mpi as _keep_workers_from_starting_mpi
from .reducer import Reducer
from .runtime import patient_waits
from .sharding import Sharding, global_norm
from .topology import Topology
from .work import Work

__all__ = [
    "CommunicationError",
    "CommunicatorBase",
    "FinalizedError",
    "PeerError",
    "RankMismatchError",
    "Reducer",
    "Sharding",
    "Topology",
    "Work",
    "create_communicator",
    "global_norm",
    "patient_waits",
]

_register_finder()  # again, since `.pth` files may not run (--target, PYTHONPATH)
# The script may import mpi4py.MPI itself, after this package.
_keep_workers_from_starting_mpi()
# Install the abort hook if CHAINERMN_FORCE_ABORT_ON_EXCEPTION=1.
_install_if_forced()
