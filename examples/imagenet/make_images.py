"""Makes a small folder of images to learn: parts of two photographs, and drawn shapes.

    python make_images.py images

The photographs are those that come with scikit-learn. Each of the five classes has a
folder of PNG files under `train` and one under `val`; the same arguments give the same
images.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sklearn.datasets
from PIL import Image, ImageDraw

SEED = 0
PHOTOGRAPHS = ("china", "flower")
SHAPES = {"triangle": 3, "square": 4, "circle": 60}  # their corners


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make a small folder of images")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--train", type=int, default=200, help="images a class (%(default)s)"
    )
    parser.add_argument(
        "--val", type=int, default=50, help="images a class (%(default)s)"
    )
    parser.add_argument(
        "--size", type=int, default=40, help="width and height (%(default)s)"
    )
    args = parser.parse_args(argv)

    random = np.random.RandomState(SEED)
    for part, count in (("train", args.train), ("val", args.val)):
        for name in (*PHOTOGRAPHS, *SHAPES):
            folder = args.folder / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                make(name, args.size, random).save(folder / f"{number:05}.png")
    print(
        f"{args.folder}: {args.train} images to learn and {args.val} to test, of each class"
    )


def make(name: str, size: int, random: np.random.RandomState) -> Image.Image:
    """An image of the class."""
    if name in PHOTOGRAPHS:
        return part_of(sklearn.datasets.load_sample_image(f"{name}.jpg"), size, random)
    return drawn(SHAPES[name], size, random)


def part_of(
    photograph: np.ndarray, size: int, random: np.random.RandomState
) -> Image.Image:
    """A random square of the photograph, a uint8 array of shape (height, width, 3)."""
    height, width, _ = photograph.shape
    side = random.randint(height // 4, height // 2)
    top, left = random.randint(height - side), random.randint(width - side)
    square = Image.fromarray(photograph[top : top + side, left : left + side])
    return square.resize((size, size))


def drawn(corners: int, size: int, random: np.random.RandomState) -> Image.Image:
    """A regular polygon of random size, place, angle and color on a noisy ground."""
    ground = random.randint(256, size=3) + random.randint(-30, 30, size=(size, size, 3))
    image = Image.fromarray(ground.clip(0, 255).astype(np.uint8))
    radius = random.uniform(0.2, 0.4) * size
    x, y = random.uniform(radius, size - radius, size=2)
    ImageDraw.Draw(image).regular_polygon(
        (x, y, radius),
        corners,
        random.randint(360),
        tuple(random.randint(256, size=3).tolist()),
    )
    return image


if __name__ == "__main__":
    main()
