"""Ranks of the doctor: the jobs that it starts, what ranks try, and checks of what they find."""
