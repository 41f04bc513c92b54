"""The devices that tests of ChainerMN's users ask for."""

from typing import Any

import chainer


def get_device(device_id: int | None = None, use_chainerx: bool = False) -> Any:
    """Return a device of Chainer: of NumPy, or a GPU (not collective).

    Args:
        device_id: the number of a GPU; None for the CPU.
        use_chainerx: a device of ChainerX instead.

    Raises:
        RuntimeError: there is no such device, with Chainer's message.
    """
    if use_chainerx:
        return chainer.get_device(
            "native:0" if device_id is None else f"cuda:{device_id}"
        )
    return chainer.get_device("@numpy" if device_id is None else f"@cupy:{device_id}")
