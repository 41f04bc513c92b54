"""Means of a model's gradients and broadcasts of its parameters."""

from .broadcast import bcast_parameters
from .mean import mean_gradients

__all__ = ["bcast_parameters", "mean_gradients"]
