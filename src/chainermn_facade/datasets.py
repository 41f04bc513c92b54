"""Data sets that are spread over ranks."""

from chainermn_train import create_empty_dataset, scatter_dataset, scatter_index

__all__ = ["create_empty_dataset", "scatter_dataset", "scatter_index"]
