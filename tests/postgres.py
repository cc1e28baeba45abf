"""A PostgreSQL server of the tests' own, on a socket in a temporary folder."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from pathlib import Path


def found():
    """The folder with initdb and postgres; None where they are not installed."""
    folders = [Path(path) for path in os.get_exec_path()]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next(
        (f for f in folders if (f / "initdb").exists() and (f / "postgres").exists()), None
    )


def _as_somebody():
    """A command's prefix that drops root, which postgres refuses, and the user it becomes."""
    if os.geteuid() != 0:
        return [], None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            setpriv = shutil.which("setpriv")
            if setpriv:
                ids = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
                return [setpriv, *ids], user
            return [shutil.which("runuser") or "runuser", "-u", name, "--"], user
    raise RuntimeError("no user to run postgres as")


@contextlib.contextmanager
def server(folder):
    """The URL of a fresh database; the server ends with the block."""
    where = found()
    prefix, user = _as_somebody()
    # A socket's path has at most 107 bytes, and root's temporary folders are root's alone.
    home = Path("/tmp") / f"flexattn-pg-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    home.mkdir(mode=0o700)
    if user is not None:
        os.chown(home, user.pw_uid, user.pw_gid)
    data, log = home / "data", folder / "postgres.log"
    run = {"check": True, "cwd": "/", "stdout": subprocess.DEVNULL}
    try:
        subprocess.run(
            [*prefix, where / "initdb", "-D", data, "-U", "tests", "-A", "trust", "-N"], **run
        )
        options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={home}"]
        options += ["-c", "fsync=off", "-c", "shared_buffers=16MB", "-c", "max_connections=60"]
        with log.open("w") as out:
            running = subprocess.Popen(
                [*prefix, where / "postgres", "-D", data, *options],
                stdout=out, stderr=out, cwd="/",
            )  # fmt: skip
        try:
            _wait(home, running, log)
            yield f"postgresql://tests@/postgres?host={home}"
        finally:
            running.send_signal(signal.SIGINT)  # at once, whoever is connected
            running.wait(30)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _wait(home, running, log):
    for _ in range(200):
        if "ready to accept connections" in log.read_text():
            return
        if running.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"postgres did not start:\n{log.read_text()}")
