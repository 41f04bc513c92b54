"""The error of older versions that data are too large to send."""


class DataSizeError(RuntimeError):
    """Data are too large to send; nothing raises it any more, since no size is too large.

    It is there for scripts that catch it.
    """
