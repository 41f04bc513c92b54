"""The layers of the doctor."""

from __future__ import annotations

from chainermn_tools.doctor import here, hosts, live
from chainermn_tools.doctor.runner import Layer

HERE = Layer("here", "This machine", here.CHECKS, share=0.4)
LIVE = Layer("live", "Ranks on this machine", live.CHECKS, share=0.5)
HOSTS = Layer("hosts", "Over the hosts", hosts.CHECKS, share=1.0)
