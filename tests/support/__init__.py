"""What several tests share, each thing once, in a folder for each subject.

- plugins: how pytest chooses and judges tests, on one rank and on many
- worlds: communicators, topologies, and what goes wrong on a rank
- doubles: stand-ins for CuPy, NCCL, devices and calls of MPI
- jobs: scripts that run on several ranks, and how they end
- hosts: several hosts on this machine, Slurm on them, and other Pythons
- oracles: what must come out
- training: models, trainers and iterators, exchanges of gradients, checkpoints
- watchdog: what ranks record, monitors, events
- tools: what the commands read, made up; jobs as they see them
"""
