"""Runs the doctor on the first host, and makes hosts fit for it to be content with.

It is content with hosts that one can log in to with a key, whose keys are known.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.hosts.virtual_hosts import Cluster
from tests.support.jobs import commands
from tests.support.jobs.scripts import ROOT

SECONDS = 200.0
Meanwhile = contextlib.AbstractContextManager[None]
# On two busy cores all may take ten times what it does on idle ones.
TIMEOUT = 150
CONFIG = """\
Host *
    IdentityFile {folder}/user
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    GlobalKnownHostsFile /dev/null
"""
# The doctor over hosts alone: the other stages look at the first host only, and take
# longer.
OVER_HOSTS = """\
import sys
sys.path.append(sys.argv.pop(1))
from chainermn_tools import cli, doctor
from tests.support.tools.doctor import content
doctor.LOCAL = content(doctor.LOCAL)
doctor.RANKS = content(doctor.RANKS)
cli.main()
"""


class Hosts:
    """The cluster's hosts, made ready; what is planted on one is there for a `with` block.

    Attributes:
        cluster: whose hosts these are.
        folder: with the configuration of ssh.
    """

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster = cluster
        self.folder = folder
        for name in ("user", "user.pub"):
            shutil.copy(cluster.folder / name, folder)
        key = (cluster.folder / "hostkey.pub").read_text()
        (folder / "known").write_text(f"{','.join(cluster.hosts)} {key}")
        (folder / "config").write_text(CONFIG.format(folder=folder))
        ssh = f"#!/bin/sh\nexec {shutil.which('ssh')} -F '{folder}/config' \"$@\"\n"
        commands.program(folder / "bin" / "ssh", ssh)

    @contextmanager
    def undone(self, host: str, do: Sequence[object], undo: Sequence[object]):
        """Run a command on a host, and another at the end."""
        self.cluster.run(host, *do)
        try:
            yield
        finally:
            self.cluster.run(host, *undo)

    def mounted(self, host: str, *words) -> Meanwhile:
        """Meanwhile something is mounted on one host; the last word says where."""
        return self.undone(host, ("mount", *words), ("umount", "--lazy", words[-1]))

    def instead(self, host: str, ours: Path, theirs: Path) -> Meanwhile:
        """Meanwhile the host has another file or folder in place of one."""
        return self.mounted(host, "--bind", theirs, ours.resolve())

    @contextmanager
    def ssh_config(self, text: str):
        """Meanwhile this comes first in the configuration of ssh."""
        config = self.folder / "config"
        before = config.read_text()
        config.write_text(text + before)
        try:
            yield
        finally:
            config.write_text(before)

    def examine(
        self, *, whole: bool, timeout: float = TIMEOUT, **given
    ) -> tuple[int, dict[str, Any]]:
        """The exit status of `chainermn doctor` with these options, and its findings by name.

        Unless it is to be the whole, only its stage over hosts looks.
        """
        if whole:
            words = ["-m", "chainermn_tools"]
        else:
            words = ["-c", OVER_HOSTS, str(ROOT)]
        words += ["doctor", "--json"]
        for name, value in {**given, "timeout": timeout}.items():
            dashes = "--"
            if len(name) == 1:
                dashes = "-"
            words += [f"{dashes}{name}", str(value)]
        variables = {
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.folder}/bin:{sys.prefix}/bin:{os.environ['PATH']}",
            "UCX_TLS": "tcp,self",  # else it finds out that the hosts are one machine
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
        }
        setting = [
            "env",
            "-u",
            "PYTHONPATH",
            *(f"{name}={text}" for name, text in variables.items()),
        ]
        command = [
            *self.cluster.on(self.cluster.hosts[0]),
            *setting,
            sys.executable,
            *words,
        ]
        how = {
            "stdin": subprocess.DEVNULL,
            "capture_output": True,
            "text": True,
        }
        done = subprocess.run(command, timeout=SECONDS, **how)
        found = {}
        if done.stdout:
            found = json.loads(done.stdout)
        if not found:
            raise RuntimeError(done.stderr)
        return done.returncode, {
            finding["name"]: finding for finding in found["findings"]
        }
