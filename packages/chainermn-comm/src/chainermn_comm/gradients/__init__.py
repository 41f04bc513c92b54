"""Means of a model's gradients and broadcasts of its parameters."""

from .broadcast import bcast_parameters
from .mpi_reducer import MpiReducer, mean_gradients
from .parameters import part_entries

__all__ = ["MpiReducer", "bcast_parameters", "mean_gradients", "part_entries"]
