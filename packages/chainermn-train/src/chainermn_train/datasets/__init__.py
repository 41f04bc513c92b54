"""Data sets that are spread over ranks."""

from .scatter import create_empty_dataset, scatter_dataset, scatter_index

__all__ = ["create_empty_dataset", "scatter_dataset", "scatter_index"]
