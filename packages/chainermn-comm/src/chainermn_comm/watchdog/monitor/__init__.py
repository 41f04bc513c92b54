"""Runs in a process beside the ranks, one on each machine, and reads their records."""

from .process import main as main
