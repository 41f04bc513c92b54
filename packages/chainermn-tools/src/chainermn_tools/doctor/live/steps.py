"""The steps that ranks take one after another, by the names of the checks that judge them."""

from __future__ import annotations

# All that `chainermn_comm.create_communicator` knows. Importing it here would start its hooks.
COMMUNICATORS = (
    "naive",
    "flat",
    "hierarchical",
    "two_dimensional",
    "single_node",
    "non_cuda_aware",
    "pure_nccl",
    "dummy",
)

START = "ranks start"
MEET = "ranks meet"
ORDER = "order of output"
MESSAGES = "messages"
DEVICE = "device reduce"
END = "ranks end"


def of_communicator(name: str) -> str:
    """The step that tries a communicator."""
    return f"communicator {name}"


# In this order; what may crash a rank comes late.
STEPS = (
    START,
    MEET,
    ORDER,
    MESSAGES,
    *(of_communicator(name) for name in COMMUNICATORS),
    DEVICE,
    END,
)
