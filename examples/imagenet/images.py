"""A folder of images as a data set: paths travel, and each rank reads the files of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import chainer
import numpy as np
from PIL import Image

MARGIN = 8 / 7  # how much larger than what is cut out of them images are made


def find(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """The images in a folder that has a folder for each class.

    Returns:
        Pairs of a path, relative to `folder`, and the number of its class; and the
        names of the classes.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is no folder; `make_images.py` makes a small one"
        )
    classes = sorted(each.name for each in folder.iterdir() if each.is_dir())
    pairs = [
        (f"{name}/{file.name}", label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).iterdir())
    ]
    if not pairs:
        raise ValueError(
            f"{folder} has no images in it: one folder a class is expected"
        )
    return pairs, classes


def find_both(
    folder: Path,
) -> tuple[list[tuple[str, int]], list[tuple[str, int]], list[str]]:
    """The images to learn and those to test, which are of the same classes, and their names."""
    train, classes = find(folder / "train")
    val, others = find(folder / "val")
    if others != classes:
        raise ValueError(f"{folder}: train has classes {classes}, val has {others}")
    return train, val, classes


class Images(chainer.dataset.DatasetMixin):
    """Squares of images: uint8 of shape (3, size, size), and an int32 label.

    Args:
        pairs: paths relative to `folder`, and labels.
        folder: where the images are, on this rank's host.
        size: width and height of what is cut out of each image.
        anywhere: cut it out anywhere, and mirror every other; else it is the middle.
    """

    def __init__(
        self, pairs: Sequence[tuple[str, int]], folder: Path, size: int, anywhere: bool
    ) -> None:
        self.pairs = pairs
        self.folder = folder
        self.size = size
        self.anywhere = anywhere

    def __len__(self) -> int:
        return len(self.pairs)

    def get_example(self, i: int) -> tuple[np.ndarray, np.int32]:
        path, label = self.pairs[i]
        with Image.open(self.folder / path) as file:
            image = file.convert("RGB")
        scale = self.size * MARGIN / min(image.size)
        width, height = (max(self.size, round(side * scale)) for side in image.size)
        pixels = np.asarray(image.resize((width, height)))
        top, left = (height - self.size) // 2, (width - self.size) // 2
        if self.anywhere:
            top = np.random.randint(height - self.size + 1)
            left = np.random.randint(width - self.size + 1)
        pixels = pixels[top : top + self.size, left : left + self.size].transpose(
            2, 0, 1
        )
        if self.anywhere and np.random.randint(2):
            pixels = pixels[:, :, ::-1]
        return np.ascontiguousarray(pixels), np.int32(label)
