"""The communicators' classes, which differ in the algorithms for means of gradients.

``create_communicator`` makes them, and says what each name means.
"""

from __future__ import annotations

from .mpi_start import keep_workers_from_starting_mpi

keep_workers_from_starting_mpi()

from .mpi_communicator import MpiCommunicator  # noqa: E402

MpiCommunicatorBase = MpiCommunicator  # its name in ChainerMN 1.3


class NaiveCommunicator(MpiCommunicator, name="naive"):
    """The communicator ``naive``."""


class FlatCommunicator(MpiCommunicator, name="flat"):
    """The communicator ``flat``."""


class HierarchicalCommunicator(MpiCommunicator, name="hierarchical"):
    """The communicator ``hierarchical``."""


class TwoDimensionalCommunicator(MpiCommunicator, name="two_dimensional"):
    """The communicator ``two_dimensional``."""


class SingleNodeCommunicator(MpiCommunicator, name="single_node"):
    """The communicator ``single_node``."""


class NonCudaAwareCommunicator(MpiCommunicator, name="non_cuda_aware"):
    """The communicator ``non_cuda_aware``."""


class PureNcclCommunicator(MpiCommunicator, name="pure_nccl"):
    """The communicator ``pure_nccl``."""


class DummyCommunicator(MpiCommunicator, name="dummy"):
    """The communicator ``dummy``."""


# All of those above, by their names.
CLASSES: dict[str, type[MpiCommunicator]] = {
    each.communicator_name: each
    for each in list(vars().values())
    if isinstance(each, type)
    and issubclass(each, MpiCommunicator)
    and each is not MpiCommunicator
}
