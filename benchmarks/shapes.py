"""The models whose gradients are averaged, as dicts from parameter name to shape."""

from __future__ import annotations

import itertools
from math import prod

Shapes = dict[str, tuple[int, ...]]


def resnet50() -> Shapes:
    """ResNet-50's 161 arrays: 53 convolutions without bias, as many batch normalizations, fc."""
    shapes: Shapes = {}

    def convolution(name: str, channels: int, out: int, kernel: int) -> None:
        shapes[f"{name}_conv_W"] = (out, channels, kernel, kernel)
        shapes[f"{name}_bn_gamma"] = shapes[f"{name}_bn_beta"] = (out,)

    convolution("stem", 3, 64, 7)
    channels = 64
    for stage, (blocks, width) in enumerate(
        ((3, 64), (4, 128), (6, 256), (3, 512)), start=2
    ):
        for block in range(blocks):
            name = f"res{stage}_{block}"
            convolution(f"{name}_a", channels, width, 1)
            convolution(f"{name}_b", width, width, 3)
            convolution(f"{name}_c", width, 4 * width, 1)
            if block == 0:  # the shortcut has to change the number of channels
                convolution(f"{name}_shortcut", channels, 4 * width, 1)
            channels = 4 * width
    shapes["fc_W"], shapes["fc_b"] = (1000, channels), (1000,)
    assert (len(shapes), elements(shapes)) == (161, 25_557_032)
    return shapes


def mlp(*units: int) -> Shapes:
    """A multilayer perceptron with these numbers of units, from input to output."""
    shapes: Shapes = {}
    for layer, (n_in, n_out) in enumerate(itertools.pairwise(units), start=1):
        shapes[f"l{layer}_W"], shapes[f"l{layer}_b"] = (n_out, n_in), (n_out,)
    return shapes


def elements(shapes: Shapes) -> int:
    """How many numbers the arrays hold."""
    return sum(map(prod, shapes.values()))


MODELS: dict[str, Shapes] = {
    "ResNet-50": resnet50(),
    "MLP 784-1000-1000-10": mlp(784, 1000, 1000, 10),
    "1,000 arrays of 100": {f"tiny{i:03}": (100,) for i in range(1000)},
    "digits MLP 64-100-100-10": mlp(64, 100, 100, 10),
}
QUICK = ("1,000 arrays of 100", "digits MLP 64-100-100-10")

# Bytes of one array, for time against bytes: 1 KiB to 256 MiB.
SIZES = [1 << power for power in range(10, 29, 2)]
QUICK_SIZES = SIZES[:4]
