"""The error of older versions for data that are too large to send."""


class DataSizeError(RuntimeError):
    """Data are too large to send. No size is too large now, so nothing raises this error.

    The class exists for scripts that catch it.
    """
