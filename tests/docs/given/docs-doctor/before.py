# ruff: noqa: F401
from types import SimpleNamespace

from chainermn_tools.doctor.check import Answer, Context, check, failed, ok

drive = SimpleNamespace(is_on=lambda: True)
