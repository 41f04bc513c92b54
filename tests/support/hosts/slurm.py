"""A real Slurm whose nodes are the hosts of a cluster: its daemons end with the hosts.

Each host has its own network, /run and processes, so that nothing here meets a Slurm or
munge of this machine, or of another run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.hosts.virtual_hosts import Cluster, missing
from tests.support.jobs import commands
from tests.support.jobs.processes import soon
from tests.support.jobs.runner import (
    MPIEXEC,
    Job,
    Meanwhile,
    on_open_mpi,
    run_command,
    variables,
)

# Program and the Debian package that brings it.
PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
}
# srun looks for PMIx by a link of it.
PACKAGES = ("libpmix-dev", "slurm-wlm-basic-plugins")
NODES = ("alpha", "beta")
# How Slurm is to start ranks of this MPI.
PMI = "pmi2"
if on_open_mpi():
    PMI = "pmix"
# With UCX, MPICH sends addresses in lines that Slurm's PMI 2 can't take, filled up with
# whatever its memory holds: a job starts, or hangs.
SRUN = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
# It waits for ranks that leave last; --kill-on-bad-exit would end them, and change the
# status. By what a script of four tasks starts its ranks; Python's script follows.
STARTS = {
    "srun": f"MPIR_CVAR_CH4_NETMOD=ofi srun --mpi={PMI} --wait=60 {sys.executable}",
    "mpiexec": f"mpiexec -n 4 {sys.executable}",
    "launch": f"{sys.executable} -m chainermn_tools launch",
}
EXPLAIN = (sys.executable, "-m", "chainermn_tools", "explain")
DAEMONS = {"munged", "slurmctld", "slurmd", "slurmscriptd", "slurmstepd"}
# It ends a hang, no more.
SECONDS = 180.0
LOOK_SECONDS = 0.2  # between looks at what Slurm says
CGROUPS = Path("/sys/fs/cgroup/memory")
NODE_SILENCE = 8  # after which a node that doesn't answer is down

# A requeued job may start again once credentials of before have expired.
CONF = """\
ClusterName=tests
SlurmctldHost={head}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=6
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
MpiDefault=pmi2
ReturnToService=2
SlurmdTimeout={silence}
InactiveLimit=0
KillWait=5
MinJobAge=300
MessageTimeout=30
TreeWidth=2
SchedulerParameters=batch_sched_delay=1,sched_interval=2,sched_min_interval=0,bf_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
NodeName={nodes} CPUs=2 RealMemory={memory} State=UNKNOWN
PartitionName=all Nodes={nodes} Default=YES MaxTime=60 DefaultTime=10 State=UP OverSubscribe=FORCE:4
"""


def lacking() -> str:
    """What this machine lacks to run a Slurm; "" if nothing."""
    programs = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    if programs:
        packages = sorted({*PACKAGES, *(PROGRAMS[name] for name in programs)})
        return (
            f"no {', '.join(programs)} (Debian: apt-get install {' '.join(packages)})"
        )
    return missing()


class Slurm:
    """A Slurm of two nodes, of which the first runs the controller, too; a context manager.

    Attributes:
        cluster: whose hosts the nodes are.
        folder: of its files, which all nodes see.
    """

    def __init__(self):
        """Start it, and wait until both nodes are idle."""
        with ExitStack() as undo:
            self.cluster = undo.enter_context(Cluster(NODES))
            self.folder = self.cluster.folder / "slurm"
            (self.folder / "state").mkdir(parents=True)
            self._configure()
            commands_of_munge = ("mungekey", "-c", "-k", self.folder / "munge.key")
            self.cluster.run(NODES[0], *commands_of_munge)
            for node in NODES:
                self._start_munge(node)
            self.start(NODES[0], "slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
            self.await_nodes("idle", *NODES)
            undo.pop_all()

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_):
        self.cluster.close()

    # Its daemons

    def start(self, node: str, program: str, *words) -> int:
        """Start a daemon on a node, where it finds this Slurm; its process's number."""
        found = shutil.which(program, path=_path())
        environment = ("env", f"SLURM_CONF={self.conf}")
        return self.cluster.start(node, *environment, found, *words)

    def start_node(self, node: str):
        """Start a node's daemon, which takes jobs."""
        self.start(node, "slurmd", "-D", "-N", node)

    def stop_node(self, node: str):
        """End a node's daemon and all that it runs, as a node does that loses its power."""
        kept = {"munged", "slurmctld", "slurmscriptd"}

        def others() -> list[psutil.Process]:
            return [
                one for one, name in self.processes(node).items() if name not in kept
            ]

        for process in others():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert soon(lambda: not others())
        self.cluster.run(node, "find", "/dev/shm", "-mindepth", "1", "-delete")

    def await_nodes(self, state: str, *nodes: str):
        """Wait until nodes are in a state such as "idle"; an end of the wait is a failure."""
        said = ""

        def are_so() -> bool:
            nonlocal said
            # The controller starts.
            with suppress(subprocess.CalledProcessError):
                said = self.client(
                    "sinfo", "-h", "-N", "-o", "%N %T", "-n", ",".join(nodes)
                )
            return said.split()[1::2] == [state] * len(nodes)

        if not soon(are_so, SECONDS, LOOK_SECONDS):
            logs = "\n".join(
                path.read_text()[-3000:] for path in self.folder.glob("*.log")
            )
            raise RuntimeError(f"nodes should be {state}, and are: {said}\n{logs}")

    @property
    def conf(self) -> Path:
        """Its configuration, to which a test may add lines before `reconfigure`."""
        return self.folder / "slurm.conf"

    def _configure(self):
        nodes = ",".join(NODES)
        settings = {"head": NODES[0], "silence": NODE_SILENCE, "nodes": nodes}
        memory = psutil.virtual_memory().total // (1 << 20) - 512
        self.conf.write_text(CONF.format(folder=self.folder, memory=memory, **settings))
        # Nodes share /tmp, where PMIx would make the same folder on each.
        (self.folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/run\n")

    def _start_munge(self, node: str):
        socket = "/run/munge/munge.socket.2"
        self.cluster.run(node, "mkdir", "-p", "-m", "755", "/run/munge")
        key = f"--key-file={self.folder}/munge.key"
        own = self.folder / f"munge-{node}"
        files = [f"--{kind}-file={own}.{kind}" for kind in ("log", "pid", "seed")]
        self.start(
            node, "munged", "--foreground", "--force", key, f"--socket={socket}", *files
        )
        assert soon(lambda: self.succeeds(node, "test", "-S", socket))

    def succeeds(self, node: str, *command) -> bool:
        """Whether a command on a node does."""
        try:
            self.cluster.run(node, *command)
        except subprocess.CalledProcessError:
            return False
        return True

    # Jobs

    def client(self, *command) -> str:
        """What a program of Slurm such as ``squeue`` prints, on the first node."""
        return self.cluster.run(NODES[0], "env", f"SLURM_CONF={self.conf}", *command)

    def run(
        self,
        *command,
        environment: dict[str, str] | None = None,
        seconds: float = SECONDS,
        cwd: Path | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Job:
        """Run a program on the first node, outside of any job, such as srun; see `run_command`."""
        words = [*self.cluster.on(NODES[0]), "env", "-C", str(cwd or self.folder)]
        whole = [*words, *map(str, command)]
        return run_command(
            whole,
            self.variables(environment),
            seconds,
            self.jobs_processes,
            meanwhile=meanwhile,
        )

    def variables(self, environment: dict[str, str] | None = None) -> dict[str, str]:
        """What programs find that are run on a node."""
        set_here = {
            "SLURM_CONF": str(self.conf),
            "UCX_TLS": "tcp,self",  # else it finds out that the nodes are one machine
            "PATH": os.pathsep.join(
                [str(MPIEXEC.parent), os.environ["PATH"], "/usr/sbin"]
            ),
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
        }
        found = variables({**set_here, **(environment or {})})
        return {
            name: value
            for name, value in found.items()
            if not name.startswith("SLURM_JOB")
        }

    def submit(
        self, text: str, *options, environment: dict[str, str] | None = None
    ) -> Submitted:
        """Submit a script of these lines with sbatch; ``python`` in it is this one."""
        count = len(list(self.folder.glob("job-*")))
        folder = self.folder / f"job-{count}"
        folder.mkdir()
        script = commands.program(folder / "job.sh", f"#!/bin/bash\n{text}\n")
        # %a of a job that is no array is 4294967294.
        kind = "0"
        if any("--array" in str(one) for one in options):
            kind = "%a"
        output = (
            f"--output={folder}/out.{kind}",
            "--open-mode=append",
            f"--chdir={folder}",
        )
        words = ("sbatch", "--parsable", *output, *options, script)
        said = self.run(*words, environment=environment)
        assert said.returncode == 0, said
        return Submitted(self, said.out.strip(), folder)

    def batch(self, text: str, *options, **how: dict[str, str]) -> tuple[str, str]:
        """Submit a script and wait for its end: its state, as Slurm calls it, and what it said."""
        job = self.submit(text, *options, **how)
        return job.wait(), job.output()

    def processes(self, node: str) -> dict[psutil.Process, str]:
        """What runs on a node, its sshd apart, and its name."""
        space = os.readlink(f"/proc/{self.cluster.inits[node]}/ns/pid")
        found = {}
        for process in self.cluster.processes():
            with suppress(OSError, psutil.Error):
                is_there = os.readlink(f"/proc/{process.pid}/ns/pid") == space
                if is_there and process.status() != psutil.STATUS_ZOMBIE:
                    found[process] = process.name()
        return found

    def jobs_processes(self) -> list[psutil.Process]:
        """All that jobs run on the nodes."""
        found = []
        for process in self.cluster.processes():
            with suppress(psutil.Error):
                if (
                    process.name() not in DAEMONS
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def segments(self) -> list[str]:
        """The files in /dev/shm of all nodes."""
        return [
            f"{node}: {name}"
            for node in NODES
            for name in self.cluster.run(node, "ls", "-A", "/dev/shm").split()
        ]

    def lose_node_of(self, job: Submitted, node: str):
        """End a node's daemon once the job is ready, and let the job go on when that is seen."""
        assert soon(lambda: (job.folder / "ready").exists(), SECONDS, LOOK_SECONDS)
        self.stop_node(node)
        try:
            self.await_nodes("down*", node)
            (job.folder / "go").touch()
            job.wait()
        finally:
            self.start_node(node)
            self.await_nodes("idle", node)

    @contextmanager
    def memory_limit(self, node: str, nbytes: int):
        """Meanwhile what the node's daemon starts may use this much, by a control group."""
        group = CGROUPS / f"chainermn-{self.cluster.inits[node]}"
        group.mkdir()
        (daemon,) = [
            one for one, name in self.processes(node).items() if name == "slurmd"
        ]
        try:
            (group / "memory.limit_in_bytes").write_text(str(nbytes))
            (group / "cgroup.procs").write_text(str(daemon.pid))
            yield
        finally:
            (CGROUPS / "cgroup.procs").write_text(str(daemon.pid))
            assert soon(lambda: not (group / "cgroup.procs").read_text())
            group.rmdir()

    @contextmanager
    def setting(self, *lines: str):
        """Meanwhile the configuration has other lines, in place of those of the same names."""
        before = self.conf.read_text()
        names = tuple(f"{line.split('=')[0]}=" for line in lines)
        kept = [line for line in before.splitlines() if not line.startswith(names)]
        self.conf.write_text("\n".join([*kept, *lines, ""]))
        self.client("scontrol", "reconfigure")
        try:
            yield
        finally:
            self.conf.write_text(before)
            self.client("scontrol", "reconfigure")


class Submitted:
    """A job that was submitted.

    Attributes:
        number: as Slurm counts jobs.
        folder: where it runs.
    """

    def __init__(self, slurm: Slurm, number: str, folder: Path):
        self.slurm = slurm
        self.number = number
        self.folder = folder

    def state(self) -> str:
        """As Slurm calls it, such as "RUNNING"; of an array, that of its first task."""
        shown = self.slurm.client("scontrol", "show", "job", self.number)
        return re.findall(r"JobState=(\S+)", shown)[0]

    def states(self) -> list[str]:
        """The state of each task of an array."""
        shown = self.slurm.client("scontrol", "show", "job", self.number)
        return re.findall(r"JobState=(\S+)", shown)

    def output(self) -> str:
        """What it printed until now; of an array, task after task."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("out.*")))

    def await_output(self, text: str):
        """Wait until it has printed this; an end of the wait is a failure."""

        def is_over():
            return text in self.output() or self.state() in ENDED

        if not soon(
            is_over,
            SECONDS,
            LOOK_SECONDS,
        ):
            raise RuntimeError(f"{text!r} didn't come: {self.state()}\n{self.output()}")
        assert text in self.output(), self.output()

    def wait(self, seconds: float = SECONDS) -> str:
        """Wait for its end; return its state. A job that doesn't end is cancelled."""
        try:

            def have_ended():
                return set(self.states()) <= ENDED

            ended = soon(have_ended, seconds, LOOK_SECONDS)
            assert ended, f"{self.states()}\n{self.output()}"
        except BaseException:
            self.cancel()
            raise
        return self.state()

    def cancel(self, *options):
        """End it, or send it a signal."""
        self.slurm.client("scancel", *options, self.number)


ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
