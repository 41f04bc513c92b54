"""Runs the doctor on the first host, and makes hosts fit for it to be content with.

It is content with hosts that one can log in to with a key, whose keys are known, and whose shells
set what this one does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.virtual_hosts import Cluster

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 200.0
# On two busy cores all may take ten times what it does on idle ones.
TIMEOUT = 90
LIBRARIES = "/opt/of our own/lib"
CONFIG = """\
Host *
    IdentityFile {folder}/user
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    GlobalKnownHostsFile /dev/null
"""
# The doctor over hosts alone: the other layers look at the first host only, and take longer.
OVER_HOSTS = """\
import json, sys
sys.path.append(sys.argv[1])
from tests.support.doctor import over_hosts
findings = over_hosts(**json.loads(sys.argv[2]))
print(json.dumps({"findings": [vars(one) for one in findings]}))
sys.exit(any(one.status in ("failed", "warning") for one in findings))
"""


class Hosts:
    """The cluster's hosts, made ready; what is planted on one is there for a `with` block.

    Attributes:
        cluster: whose hosts these are.
        folder: with the configuration of ssh.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self._shell_start = _shell_start()
        for name in ("user", "user.pub"):
            shutil.copy(cluster.folder / name, folder)
        key = (cluster.folder / "hostkey.pub").read_text()
        (folder / "known").write_text(f"{','.join(cluster.hosts)} {key}")
        (folder / "config").write_text(CONFIG.format(folder=folder))
        (folder / "bin").mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.write_text(f"#!/bin/sh\nexec {shutil.which('ssh')} -F '{folder}/config' \"$@\"\n")
        ssh.chmod(0o755)
        (folder / "bashrc").write_text(f"export LD_LIBRARY_PATH='{LIBRARIES}'\n")

    @contextlib.contextmanager
    def ready(self) -> Iterator[Hosts]:
        """Meanwhile shells on all hosts set what the doctor has."""
        with contextlib.ExitStack() as stack:
            for host in self.cluster.hosts:
                stack.enter_context(self.start_of_shells(host, self.folder / "bashrc"))
            yield self

    @contextlib.contextmanager
    def mounted(self, host: str, *words: object) -> Iterator[None]:
        """Meanwhile something is mounted on one host; the last word says where."""
        self.cluster.run(host, "mount", *words)
        try:
            yield
        finally:
            self.cluster.run(host, "umount", "--lazy", words[-1])

    def instead(
        self, host: str, ours: Path, theirs: Path
    ) -> contextlib.AbstractContextManager[None]:
        """Meanwhile the host has another file or folder in place of one."""
        return self.mounted(host, "--bind", theirs, ours.resolve())

    def start_of_shells(self, host: str, file: Path) -> contextlib.AbstractContextManager[None]:
        """Meanwhile every shell that ssh starts on the host reads this file first."""
        return self.instead(host, self._shell_start, file)

    @contextlib.contextmanager
    def ssh_config(self, text: str) -> Iterator[None]:
        """Meanwhile this comes first in the configuration of ssh."""
        config = self.folder / "config"
        before = config.read_text()
        config.write_text(text + before)
        try:
            yield
        finally:
            config.write_text(before)

    def examine(
        self, *, whole: bool, timeout: float = TIMEOUT, **given: object
    ) -> tuple[int, dict[str, Any]]:
        """Let the doctor examine the hosts.

        Args:
            whole: all of `chainermn doctor`; else its layer over hosts alone.
            timeout: that it is given.
            given: its options by name.

        Returns:
            Its exit status, and its findings by name.
        """
        if whole:
            words: list[object] = ["-m", "chainermn_tools", "doctor", "--json"]
            for name, value in {**given, "timeout": timeout}.items():
                words += [f"{'-' if len(name) == 1 else '--'}{name}", value]
        else:
            words = ["-c", OVER_HOSTS, ROOT, json.dumps({**given, "timeout": timeout}, default=str)]
        variables = {
            "LD_LIBRARY_PATH": LIBRARIES,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.folder}/bin:{sys.prefix}/bin:{os.environ['PATH']}",
            "UCX_TLS": "tcp,self",  # else it finds out that the hosts are one machine
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
        }
        setting = [f"{name}={value}" for name, value in variables.items()]
        command = ("env", "-u", "PYTHONPATH", *setting, sys.executable, *words)
        try:
            status, printed = 0, self.cluster.run(self.cluster.hosts[0], *command, seconds=SECONDS)
        except subprocess.CalledProcessError as ended:
            if not ended.stdout:
                raise RuntimeError(ended.stderr) from None
            status, printed = ended.returncode, ended.stdout
        return status, {finding["name"]: finding for finding in json.loads(printed)["findings"]}


def _shell_start() -> Path:
    """What bash reads when ssh starts it."""
    files = [Path.home() / ".bashrc", Path("/etc/bash.bashrc")]
    return next(file for file in files if file.exists())
