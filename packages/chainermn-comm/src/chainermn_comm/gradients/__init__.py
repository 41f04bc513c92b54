"""Means of a model's gradients and broadcasts of its parameters."""

from .broadcast import bcast_parameters
from .mean import GradientMean, mean_gradients

__all__ = ["GradientMean", "bcast_parameters", "mean_gradients"]
