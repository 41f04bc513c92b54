"""Runs in the ranks: what they record of their calls, and how their monitors are started."""
