"""Runs in the ranks: records their calls, and starts their monitors."""
