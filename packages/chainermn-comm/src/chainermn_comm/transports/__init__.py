"""The ways in which buffers move."""
