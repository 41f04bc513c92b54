"""Runs in a process beside the ranks, one on each machine, and reads what they record."""

from .process import main as main
