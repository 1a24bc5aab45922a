"""A throw-away Slurm on loopback: real daemons, pretended nodes with typed GPUs, nothing in /etc.

Several slurmd of one host stand for several nodes, which Debian's build allows. A pretended GPU is
a character device, since Slurm counts nothing else and sets CUDA_VISIBLE_DEVICES for nothing else.
Everything listens on 127.0.0.1. Daemons die with the process that started them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge", "slurmdbd", "mariadb-server-core", "mariadb-client-core")
_DAEMONS = ("munged", "slurmctld", "slurmd")
_DATABASE = ("slurmdbd", "mariadbd", "mariadb-install-db")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
# What every Linux has, for whoever may not make devices.
_BORROWED = ("null", "zero", "full", "random", "urandom", "tty")


@dataclass(frozen=True, slots=True)
class Node:
    """A pretended node: `gpus` as in `gpu:h100:2`, empty for none."""

    name: str
    gpus: str = ""
    features: str = ""
    partition: str = "gpu"


def missing(*, accounting: bool) -> str:
    """Why no cluster can be brought up here; empty if it can."""
    needed = _DAEMONS + (_DATABASE if accounting else ())
    absent = [name for name in needed if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install --no-install-recommends " + " ".join(
            PACKAGES
        )
    with suppress(OSError):
        if socket.gethostbyname(socket.gethostname()).startswith("127."):
            return ""
    return "this host's own name does not resolve to 127.x, where alone the daemons may listen"


class Daemons:
    """Processes that end with us, and a folder for what they write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        for name in ("log", "run", "state", "spool", "dev", "key"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "key").chmod(0o700)

    def start(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PATH": _PATH, **(env or {})},
            )
        self._running.append(process)

    def stop(self) -> None:
        for process in reversed(self._running):
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def wait_for(self, what: str, ready: Callable[[], bool], timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > end:
                logs = sorted((self.folder / "log").iterdir())
                tails = "\n".join(f"{path}: {path.read_text()[-800:]}" for path in logs)
                raise TimeoutError(f"{what} did not come up\n{tails}")
            time.sleep(0.1)


class Site(Daemons):
    """What clusters share: the authentication, and the accounting where it is wanted."""

    def __init__(self, folder: Path, *, accounting: bool) -> None:
        super().__init__(folder)
        self.accounting = accounting
        self.socket = folder / "run" / "munge.sock"
        self.database_port = _free_port()
        self.accounting_port = _free_port()
        (folder / "key" / "munge.key").write_bytes(os.urandom(1024))
        (folder / "key" / "munge.key").chmod(0o600)
        folder.chmod(0o755)
        self.start(
            "munged", "munged", "--foreground", "--force",
            f"--key-file={folder}/key/munge.key", f"--socket={self.socket}",
            f"--pid-file={folder}/run/munged.pid", f"--log-file={folder}/log/munged.log",
            f"--seed-file={folder}/key/seed",
        )  # fmt: skip
        self.wait_for("munge", lambda: _ok("munge", "-n", "-S", str(self.socket)))
        if accounting:
            self._start_accounting()

    def _start_accounting(self) -> None:
        folder, user = self.folder, _user()
        password = os.urandom(12).hex()
        _run(
            "mariadb-install-db", "--no-defaults", f"--datadir={folder}/db", f"--user={user}",
            "--auth-root-authentication-method=normal", "--skip-test-db",
        )  # fmt: skip
        (folder / "key" / "init.sql").write_text(
            "CREATE DATABASE IF NOT EXISTS slurm_acct;\n"
            f"CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
            "GRANT ALL ON slurm_acct.* TO 'slurm'@'127.0.0.1';\n"
        )
        self.start(
            "mariadbd", "mariadbd", "--no-defaults", f"--user={user}", f"--datadir={folder}/db",
            f"--socket={folder}/run/mysql.sock", "--bind-address=127.0.0.1",
            f"--port={self.database_port}", "--skip-name-resolve",
            f"--pid-file={folder}/run/mariadbd.pid", f"--init-file={folder}/key/init.sql",
            "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M",
            "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        configuration = folder / "slurmdbd.conf"
        configuration.write_text(
            f"""AuthType=auth/munge
AuthInfo=socket={self.socket}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={self.accounting_port}
CommunicationParameters=NoInAddrAny
SlurmUser={user}
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={self.database_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct
"""
        )
        configuration.chmod(0o600)
        login = ("-h", "127.0.0.1", "-P", str(self.database_port), "-u", "slurm", f"-p{password}")
        self.wait_for(
            "MariaDB",
            lambda: _ok("mariadb", "--no-defaults", *login, "-e", "use slurm_acct"),
        )
        # slurmdbd looks for its file beside slurm.conf
        (folder / "slurm.conf").write_text(f"ClusterName=none\nSlurmctldHost=localhost\n"
                                           f"AuthInfo=socket={self.socket}\n")  # fmt: skip
        self.start("slurmdbd", "slurmdbd", "-D", env={"SLURM_CONF": f"{folder}/slurm.conf"})


class Cluster(Daemons):
    """One controller and its pretended nodes."""

    def __init__(
        self,
        site: Site,
        folder: Path,
        nodes: Sequence[Node],
        *,
        name: str = "test",
        extra: str = "",
    ) -> None:
        super().__init__(folder)
        self.site, self.nodes, self.name = site, nodes, name
        self.conf = folder / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf), "PATH": _PATH}
        self.conf.write_text(self._configuration(extra))
        (folder / "gres.conf").write_text(self._devices())
        if site.accounting:
            self.wait_for("slurmdbd", lambda: self.ok("sacctmgr", "-in", "show", "cluster"))
            for entity in (
                ("cluster", name),
                ("account", "lab"),
                ("user", _user(), "account=lab", "adminlevel=admin"),
            ):
                self.ok("sacctmgr", "-i", "add", *entity)
        self.start("slurmctld", "slurmctld", "-D", "-c", env=self.env)
        self.wait_for("slurmctld", lambda: self.ok("sinfo", "-h"))
        for node in nodes:
            (folder / "spool" / node.name).mkdir()
            self.start(f"slurmd-{node.name}", "slurmd", "-D", "-N", node.name, env=self.env)
        self.wait_for("all nodes", self._all_idle)

    def run(self, *command: str) -> str:
        """What a command of Slurm prints, asked of this cluster."""
        return _run(*command, env=self.env)

    def ok(self, *command: str) -> bool:
        return _ok(*command, env=self.env)

    def stop(self) -> None:
        """End the jobs first: their shepherds outlive the daemon that started them."""
        self.ok("scancel", "--full", "--quiet", f"--user={_user()}")
        with suppress(TimeoutError, RuntimeError):
            self.wait_for("an empty queue", lambda: not self.run("squeue", "-h").strip(), 5.0)
        super().stop()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (process / "comm").read_text().strip() != "slurmstepd":
                    continue
                environment = (process / "environ").read_bytes().split(b"\0")
                if f"SLURM_CONF={self.conf}".encode() in environment:
                    os.kill(int(process.name), signal.SIGKILL)

    def _all_idle(self) -> bool:
        told = self.run("sinfo", "-hN", "-o", "%N %t").split("\n")
        idle = {line.split()[0] for line in told if line.endswith(("idle", "mix", "alloc"))}
        return len(idle) == len(self.nodes)

    def _configuration(self, extra: str) -> str:
        folder, site = self.folder, self.site
        accounting = "AccountingStorageType=accounting_storage/none"
        if site.accounting:
            accounting = f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={site.accounting_port}
AccountingStoragePass={site.socket}
AccountingStorageTRES=gres/gpu"""
        ports = _free_port()
        lines = [
            f"NodeName={node.name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={_free_port()} "
            "CPUs=8 RealMemory=64000"
            + (f" Gres={node.gpus}" if node.gpus else "")
            + (f" Feature={node.features}" if node.features else "")
            for node in self.nodes
        ]
        for partition in dict.fromkeys(node.partition for node in self.nodes):
            members = ",".join(node.name for node in self.nodes if node.partition == partition)
            lines.append(f"PartitionName={partition} Nodes={members} MaxTime=1-0 DefaultTime=5")
        lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=1-0 DefaultTime=5")
        return f"""ClusterName={self.name}
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={_user()}
SlurmdUser={_user()}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={site.socket}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={ports}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=2000
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
MpiDefault=none
MailProg=/bin/true
KillWait=1
MinJobAge=3600
GresTypes=gpu
{accounting}
{extra}
""" + "\n".join([*lines, ""])

    def _devices(self) -> str:
        lines = []
        for node in self.nodes:
            kind, *gpu_type, count = node.gpus.split(":") if node.gpus else ("gpu", "0")
            for number in range(int(count)):
                device = self.folder / "dev" / f"{node.name}-{number}"
                try:
                    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
                except PermissionError:
                    device = Path("/dev") / _BORROWED[number]
                named = f" Type={gpu_type[0]}" if gpu_type else ""
                lines.append(f"NodeName={node.name} Name={kind}{named} File={device}")
        return "\n".join([*lines, ""])


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _run(*command: str, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PATH": _PATH, **(env or {})},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _ok(*command: str, env: Mapping[str, str] | None = None) -> bool:
    try:
        _run(*command, env=env)
    except (RuntimeError, subprocess.TimeoutExpired):
        return False
    return True
