# ruff: noqa: F401
from types import SimpleNamespace

from chainermn_tools.doctor.check import CheckResult, Checks, Context, failed, ok

checks = Checks()
drive = SimpleNamespace(is_on=lambda: True)
