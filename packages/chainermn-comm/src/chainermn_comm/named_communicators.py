"""The communicators' classes, which differ in the algorithms for means of gradients.

``create_communicator`` makes them, and explains each name.
"""

from __future__ import annotations

from .mpi_start import keep_workers_from_starting_mpi

keep_workers_from_starting_mpi()

from .mpi_communicator import MpiCommunicator  # noqa: E402

MpiCommunicatorBase = MpiCommunicator  # its name in ChainerMN 1.3


class NaiveCommunicator(MpiCommunicator):
    """The communicator ``naive``."""

    communicator_name = "naive"


class FlatCommunicator(MpiCommunicator):
    """The communicator ``flat``."""

    communicator_name = "flat"


class HierarchicalCommunicator(MpiCommunicator):
    """The communicator ``hierarchical``."""

    communicator_name = "hierarchical"


class TwoDimensionalCommunicator(MpiCommunicator):
    """The communicator ``two_dimensional``."""

    communicator_name = "two_dimensional"


class SingleNodeCommunicator(MpiCommunicator):
    """The communicator ``single_node``."""

    communicator_name = "single_node"


class NonCudaAwareCommunicator(MpiCommunicator):
    """The communicator ``non_cuda_aware``."""

    communicator_name = "non_cuda_aware"


class PureNcclCommunicator(MpiCommunicator):
    """The communicator ``pure_nccl``."""

    communicator_name = "pure_nccl"


class DummyCommunicator(MpiCommunicator):
    """The communicator ``dummy``."""

    communicator_name = "dummy"


# The classes by the names that `create_communicator` knows.
CLASSES: dict[str, type[MpiCommunicator]] = {
    each.communicator_name: each
    for each in (
        NaiveCommunicator,
        FlatCommunicator,
        HierarchicalCommunicator,
        TwoDimensionalCommunicator,
        SingleNodeCommunicator,
        NonCudaAwareCommunicator,
        PureNcclCommunicator,
        DummyCommunicator,
    )
}
