"""ChainerMN's diagnostics: the command ``chainermn`` and what it is made of."""

from chainermn_tools.environment import collect, render

__all__ = ["collect", "render"]
