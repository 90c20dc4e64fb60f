"""Children with a core, a log and an end.

Takes command lines, gives processes with their CPU time and resident memory, their own children included. Never
leaves one behind: `Children` ends all of them, by pid, however the run ends; the kernel does if we are killed."""

import contextlib
import ctypes
import os
import pathlib
import select
import signal
import subprocess
import time

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
TICKS = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """What went wrong, in words for the user."""


def text(path):
    """The contents of a file of /proc, empty when its process has gone."""
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""


def tree(pid):
    """The process and everything that it started."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(int, text(f"/proc/{parent}/task/{thread}/children").split())
    return found


class Child:
    """One process, pinned to `cores`; what it writes goes to `log` unless its output is `piped`."""

    def __init__(self, name, command, cores, log, piped=False):
        self.name, self.log = name, log
        # nginx has a child of its own, which only it can end.
        last = signal.SIGTERM if name == "nginx" else signal.SIGKILL

        def begin():
            LIBC.prctl(PR_SET_PDEATHSIG, last)
            os.sched_setaffinity(0, cores)

        pipe = subprocess.PIPE if piped else None
        with open(log, "ab") as out:
            # A session of its own, so that Ctrl-C reaches us alone and children end in order.
            self.process = subprocess.Popen(
                [str(part) for part in command], stdin=pipe or subprocess.DEVNULL, stdout=pipe or out, stderr=out,
                start_new_session=True, preexec_fn=begin)
        self.pid = self.process.pid

    def tail(self):
        return "\n".join(text(self.log).splitlines()[-15:])

    def alive(self):
        if self.process.poll() is not None:
            raise Failed(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")

    def cpu(self):
        """CPU time of each thread, user and system, in ns."""
        spent = {}
        for pid in tree(self.pid):
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    exact = text(f"/proc/{pid}/task/{thread}/schedstat").split()
                    if exact:
                        spent[thread] = int(exact[0])
                        continue
                    fields = text(f"/proc/{pid}/task/{thread}/stat").rpartition(") ")[2].split()
                    if fields:
                        spent[thread] = (int(fields[11]) + int(fields[12])) * 1_000_000_000 // TICKS
        return spent

    def resident_kib(self):
        kib = 0
        for pid in tree(self.pid):
            lines = (text(f"/proc/{pid}/smaps_rollup") or text(f"/proc/{pid}/status")).splitlines()
            kib += next((int(line.split()[1]) for line in lines if line.startswith(("Rss:", "VmRSS:"))), 0)
        return kib

    def line(self, seconds):
        """The next line of a piped output."""
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise Failed(f"{self.name} said nothing in {seconds} s:\n{self.tail()}")
        line = self.process.stdout.readline().decode().strip()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2)
            raise Failed(f"{self.name} ended early:\n{self.tail()}")
        return line

    def end(self, patience_s=1.5):
        pids = tree(self.pid)
        for sign, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5)):
            if self.process.poll() is None:
                self.process.send_signal(sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(wait_s)
        for pid in pids[1:]:
            # Its session says that it is still ours, and not another process with that number.
            with contextlib.suppress(OSError):
                if os.getsid(pid) == self.pid:
                    os.kill(pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()


def spent_ns(before, after):
    """CPU time between two readings of `cpu`."""
    return sum(ns - before.get(thread, 0) for thread, ns in after.items())


def rested_s(core):
    """How long a core has done nothing since the machine started, in steps of 10 ms: what is left of the clock's time is
    all work there, interrupts included."""
    fields = next(line.split() for line in text("/proc/stat").splitlines() if line.startswith(f"cpu{core} "))
    return (int(fields[4]) + int(fields[5])) / TICKS


class Children:
    """All children of a run."""

    def __init__(self, work):
        self.work, self.all = pathlib.Path(work), []

    def start(self, name, command, cores, piped=False):
        child = Child(name, command, cores, self.work / f"{name}.log", piped)
        self.all.append(child)
        return child

    def end(self, child):
        child.end()
        self.all.remove(child)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, signal.SIG_IGN)
        for child in reversed(self.all):
            child.end()


def waited_for(what, seconds, child, done):
    """Calls `done` until it gives something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        child.alive()
        with contextlib.suppress(OSError):
            if found := done():
                return found
        time.sleep(0.05)
    raise Failed(f"{what} after {seconds} s:\n{child.tail()}")
