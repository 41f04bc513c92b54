"""Means of a model's gradients and broadcasts of its parameters."""

from .broadcast import bcast_parameters
from .mpi_reducer import MpiReducer, mean_gradients

__all__ = ["MpiReducer", "bcast_parameters", "mean_gradients"]
