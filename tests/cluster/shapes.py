"""The model whose gradients go over hosts: shape and dtype by name."""

SHAPES = {
    "a": ((7,), "float64"),
    "b": ((1_000_003,), "float32"),
    "c": ((), "float32"),
    "d": ((257, 33), "float16"),
    "e": ((0, 4), "float32"),
}
