"""The error of older versions that data are too large to send."""


class DataSizeError(RuntimeError):
    """Data are too large to send: no size is any more, so nothing raises this error.

    The class is there for scripts that catch it.
    """
