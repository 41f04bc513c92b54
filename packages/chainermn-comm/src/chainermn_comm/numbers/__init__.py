"""The arrays and integers that users may pass; how numbers are cast, added and fitted to a wire."""

from .arrays import OPERATIONS as OPERATIONS
from .arrays import accumulator as accumulator
from .arrays import as_array as as_array
from .arrays import as_bytes as as_bytes
from .arrays import as_integer as as_integer
from .arrays import can_be_summed as can_be_summed
from .arrays import check_operation as check_operation
from .arrays import empty as empty
from .arrays import integer_between as integer_between
from .arrays import one_for_each as one_for_each
from .casts import BLOCK_ELEMENTS as BLOCK_ELEMENTS
from .casts import FLOAT16 as FLOAT16
from .casts import FLOAT32 as FLOAT32
from .casts import cast_into as cast_into
from .summation import overflow_errstate as overflow_errstate
from .summation import scaled_sum as scaled_sum
from .summation import sum_rows as sum_rows
from .wire_format import absmax as absmax
from .wire_format import absmax_each as absmax_each
from .wire_format import bound_of as bound_of
from .wire_format import choose_wire_format as choose_wire_format
from .wire_format import fit_each as fit_each
from .wire_format import ldexp_each as ldexp_each
from .wire_format import ldexp_into as ldexp_into
from .wire_format import mean_format as mean_format
