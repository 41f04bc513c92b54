"""The networks that train_imagenet.py knows by name."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


def as_input(x: Any) -> Any:
    """Pixels (uint8) as numbers from -1 to 1, float16 with --fp16."""
    dtype = chainer.get_dtype(None, map_mixed16=np.float16)
    return x.astype(dtype) * dtype.type(2 / 255) - dtype.type(1)


class Block(chainer.Chain):
    """Halves the image's width and height."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.init_scope():
            self.convolution = L.Convolution2D(None, channels, 3, pad=1, nobias=True)
            self.normalization = L.BatchNormalization(channels)

    def forward(self, x: Any) -> Any:
        return F.max_pooling_2d(F.relu(self.normalization(self.convolution(x))), 2)


class Small(chainer.Chain):
    """Three convolutions, which a laptop can train."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        with self.init_scope():
            self.blocks = chainer.Sequential(Block(16), Block(32), Block(64))
            self.top = L.Linear(None, n_classes)

    def forward(self, x: Any) -> Any:
        return self.top(F.mean(self.blocks(as_input(x)), axis=(2, 3)))


class ResNet50(chainer.Chain):
    """Chainer's, with random weights."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        with self.init_scope():
            self.layers = L.ResNet50Layers(pretrained_model=None)
        with self.layers.init_scope():
            self.layers.fc6 = L.Linear(2048, n_classes)

    def forward(self, x: Any) -> Any:
        return self.layers(as_input(x), layers=["fc6"])["fc6"]


ARCHITECTURES = {"small": Small, "resnet50": ResNet50}
