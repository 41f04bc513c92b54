"""The arrays and integers that users may pass; how numbers are cast, added and fitted to a wire."""

from .arguments import as_array as as_array
from .arguments import as_integer as as_integer
from .arguments import check_operation as check_operation
from .arguments import integer_between as integer_between
from .arguments import one_for_each as one_for_each
from .arguments import wrong_kind as wrong_kind
from .casts import cast_into as cast_into
from .dtypes import FLOAT16 as FLOAT16
from .dtypes import OPERATIONS as OPERATIONS
from .dtypes import accumulator as accumulator
from .dtypes import can_be_summed as can_be_summed
from .memory import as_bytes as as_bytes
from .memory import empty as empty
from .summation import combine_into as combine_into
from .summation import divide_into as divide_into
from .summation import sum_rows as sum_rows
from .wire_format import absmax as absmax
from .wire_format import choose_wire_format as choose_wire_format
