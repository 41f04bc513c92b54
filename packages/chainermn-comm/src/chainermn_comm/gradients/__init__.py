"""The mean of a model's gradients over ranks, and its parameters' broadcast."""
