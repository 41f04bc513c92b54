"""Means of gradients on GPUs: NCCL, kernels, streams, and staging through host memory."""
