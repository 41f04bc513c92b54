"""What is measured, and the factors between its bandwidths."""

from chainermn_tools.bench import operations


def test_factors_are_those_of_nccl_tests():
    kinds = {**operations.OPERATIONS, **operations.BASELINES}
    for ranks in (1, 2, 3, 8, 1000):
        factors = {name: kind.bus_factor(ranks) for name, kind in kinds.items()}
        assert factors == {
            "mean_grad": 2 * (ranks - 1) / ranks,
            "allreduce": 2 * (ranks - 1) / ranks,
            "mpi_allreduce": 2 * (ranks - 1) / ranks,
            "allgather": (ranks - 1) / ranks,
            "bcast": 1,
            "send": 1,
            "memcpy": 1,
        }
