"""Where loopback does its receive work.

Takes nothing, gives a context in which the kernel's receive flow steering (RFS) is on for loopback: TCP receives a packet
on the core of who reads it, as between hosts, and not on the core of who sent it. Never leaves a setting behind, unless
killed with SIGKILL: then `echo 0` into `rps_cpus` of loopback (below) undoes it."""

import contextlib
import os
import pathlib

from processes import Failed

QUEUE = pathlib.Path("/sys/class/net/lo/queues/rx-0")
FLOWS = "32768"


def settings():
    """What has to be written where, in that order: nothing happens before the last."""
    cores = sum(1 << core for core in range(os.cpu_count() or 1))
    words = f"{cores:x}"
    # The kernel wants groups of eight digits.
    words = ",".join(reversed([words[max(0, end - 8):end] for end in range(len(words), 0, -8)]))
    return {pathlib.Path("/proc/sys/net/core/rps_sock_flow_entries"): FLOWS, QUEUE / "rps_flow_cnt": FLOWS, QUEUE / "rps_cpus": words}


@contextlib.contextmanager
def steered():
    """Switches it on, and back to what was there."""
    before = {}
    try:
        for path, value in settings().items():
            try:
                before[path] = path.read_text().strip()
                path.write_text(value)
            except OSError as e:
                raise Failed(f"--steer writes {value} to {path}, which needs root and a kernel with RPS: {e.strerror}") from None
        yield
    finally:
        for path, value in reversed(before.items()):
            with contextlib.suppress(OSError):
                path.write_text(value)
