"""Data sets that are spread over ranks."""

from .data_size_error import DataSizeError
from .epochs import get_epoch_trigger, get_n_iterations_for_one_epoch
from .scatter import create_empty_dataset, scatter_dataset, scatter_index
from .share import share_dataset

__all__ = [
    "DataSizeError",
    "create_empty_dataset",
    "get_epoch_trigger",
    "get_n_iterations_for_one_epoch",
    "scatter_dataset",
    "scatter_index",
    "share_dataset",
]
