"""The loads, and what each of them measures.

Takes running workers and proxies, gives rounds: figures of one proxy under one load, once. Requests, events and bytes
are counted by the workers between two readings of the proxy's CPU time, while the load goes on before and after.
Never retries: what failed is counted and said."""

import contextlib
import http.client
import json
import pathlib
import re
import signal
import subprocess
import time

from processes import Failed, rested_s, spent_ns, waited_for
from proxies import PAIRING, Proxy

WRK = pathlib.Path(__file__).resolve().parents[2] / "tuning/wrk"
PROMPT = "how are you today? " * 12
# Connections of the loads that saturate, and what is counted.
SATURATING = {
    "small": ("small.lua", 64, "requests"),
    "stream": ("stream.lua", 256, "events"),
    "bursts": ("bursts.lua", 256, "events"),
    "long": ("long.lua", 32, "requests"),
    "answer": ("answer.lua", 16, "text_bytes"),
    "pairs": ("small.lua", 64, "requests"),
}
LATENCY_CONNECTIONS = 64
# Connections that are open before the memory of the others is measured.
WARM = 200
SLOW_GAP_MS = 2000
# Between two events of the streams of wrk's scripts.
GAP_MS = 10


def body(controls="", **more):
    """A request whose prompt tells the mock workers what to do."""
    return json.dumps({"model": "mock", "messages": [{"role": "user", "content": controls + PROMPT}], **more})


class Workers:
    """The mock workers, a port each, in one process."""

    def __init__(self, options, children, ports, program):
        first = 0 if options.check else ports.take(options.workers)
        self.child = children.start("workers", [program, first, options.workers], options.load_cores, piped=True)
        self.ports = [int(port) for port in self.child.line(5).split()[1:]]

    def counted(self):
        """Sums since the start."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.ports[0], timeout=10)) as c:
            c.request("GET", "/stats")
            return json.loads(c.getresponse().read())


class Bench:
    """What a run works with."""

    def __init__(self, options, children, ports, tools):
        self.options, self.children, self.ports, self.tools = options, children, ports, tools
        self.workers = Workers(options, children, ports, tools["worker"])

    def speed(self):
        """How long the machine takes for a fixed piece of work on the proxies' core, in µs, and a cache line from there to
        the load's core and back, in ns."""
        cores = self.options.proxy_core, min(self.options.load_cores)
        probe = self.children.start("probe", [self.tools["load"], "probe", *cores], set(cores), piped=True)
        try:
            return map(float, probe.line(20).split())
        finally:
            self.children.end(probe)

    def proxy(self, name, pairs=False):
        return Proxy(name, self.options, self.children, self.ports, self.workers.ports, self.tools["relay"], pairs)

    def request(self, controls="", **more):
        path = self.children.work / "body.json"
        path.write_text(body(controls, **more))
        return path

    def saturated(self, load, proxy, seconds=None):
        """wrk, as fast as it goes."""
        options = self.options
        script, connections, what = SATURATING[load]
        seconds = seconds or options.seconds
        url = f"http://127.0.0.1:{proxy.port}/v1/chat/completions"
        idle = self.workers.counted()
        # It is stopped by a signal, so its own duration is only a bound.
        wrk = self.children.start(
            "wrk", [self.tools["wrk"], "-t1", f"-c{connections}", f"-d{int(seconds + options.warmup) + 10}s", "--timeout", "10s",
                    "-s", WRK / script, url], options.load_cores, piped=True)
        waited_for(f"{proxy.name} passed nothing on", 10, wrk, lambda: self.workers.counted() != idle)
        time.sleep(options.warmup)
        wrk.alive()
        counted, cpu, idle_s, began = self.workers.counted(), proxy.cpu(), rested_s(options.proxy_core), time.monotonic()
        time.sleep(seconds)
        counted_after, cpu_after, idle_after_s, ended = (
            self.workers.counted(), proxy.cpu(), rested_s(options.proxy_core), time.monotonic())
        wrk.process.send_signal(signal.SIGINT)
        try:
            said = wrk.process.communicate(timeout=15)[0].decode()
        except subprocess.TimeoutExpired:
            raise Failed(f"wrk did not stop under {proxy.name}") from None
        finally:
            self.children.end(wrk)
        first = len(self.workers.ports) // 2 if load == "pairs" else 0
        between = lambda after, before: sum(after["requests"][first:]) - sum(before["requests"][first:])
        asked = between(counted_after, counted)
        # Both ends must have seen the same: what wrk got whole, and what was on its way when it stopped.
        got = sum(map(int, re.findall(r"(\d+) requests in", said)))
        answered = between(self.workers.counted(), idle)
        if abs(answered - got) > 2 * connections + 0.01 * got:
            raise Failed(f"wrk had {got} answers through {proxy.name}, the workers gave {answered}:\n{said}")
        n = asked if what == "requests" else counted_after[what] - counted[what]
        failures = sum(map(int, re.findall(r"Non-2xx or 3xx responses: (\d+)", said)))
        failures += sum(map(int, re.findall(r"(?:connect|read|write|timeout) (\d+)", said)))
        if not n:
            raise Failed(f"{proxy.name} passed nothing on in {seconds} s:\n{said}\n{proxy.child.tail()}")
        if what == "events" and n / (ended - began) > 1.1 * connections * 1000 / GAP_MS:
            raise Failed(f"{proxy.name} dropped what tells the workers their pace: {n / (ended - began):.0f} events/s")
        ns, elapsed = spent_ns(cpu, cpu_after), ended - began
        figures = {"rate": n / elapsed, "busy": ns / elapsed / 1e7}
        if what == "text_bytes":
            figures |= {"gib_s": n / 2**30 / (ns / 1e9), "cpu_us": ns / 1e3 / max(asked, 1), "rate": asked / elapsed}
        else:
            figures |= {"cpu_us": ns / 1e3 / n, "core_us": (elapsed - (idle_after_s - idle_s)) * 1e6 / n}
        return figures, failures

    def paced(self, port, rate):
        """Latency of small requests at a fixed rate, in µs."""
        seconds, warmup = self.options.seconds, self.options.warmup
        load = self.children.start(
            "load", [self.tools["load"], "rate", port, self.request(max_tokens=8), LATENCY_CONNECTIONS, rate, seconds + warmup,
                     warmup], self.options.load_cores, piped=True)
        try:
            found = json.loads(load.line(seconds + 30))
        finally:
            self.children.end(load)
        if not found["measured"]:
            raise Failed(f"nothing was answered at {rate:.0f} requests/s: {found['failure']}")
        return found

    def held(self, load, name):
        """Memory of `name`, started for this, with many connections that do little; CPU time of slow streams."""
        options = self.options
        streams = load == "streams"
        slow = {"stream": True, "max_tokens": 9_999_999, "controls": f"gap_ms={SLOW_GAP_MS} event_bytes=100 "}
        path = self.request(**(slow if streams else {"max_tokens": 8}))
        proxy, hold = self.proxy(name), None
        try:
            hold = self.children.start(
                "hold", [self.tools["load"], "hold", proxy.port, path, WARM, options.connections, "stream" if streams else "idle"],
                options.load_cores, piped=True)
            hold.line(70)
            time.sleep(options.settle)
            before = proxy.resident_kib()
            hold.process.stdin.write(b"\n")
            hold.process.stdin.flush()
            hold.line(70)
            time.sleep(options.settle)
            figures = {"kib": (proxy.resident_kib() - before) / options.connections, "connections": options.connections}
            if streams:
                counted, cpu = self.workers.counted(), proxy.cpu()
                time.sleep(options.seconds)
                counted_after, cpu_after = self.workers.counted(), proxy.cpu()
                figures["cpu_us"] = spent_ns(cpu, cpu_after) / 1e3 / max(counted_after["events"] - counted["events"], 1)
            hold.alive()
            return figures, 0
        finally:
            if hold:
                self.children.end(hold)
            self.children.end(proxy.child)


def turns(names, round_):
    """The order of a round: everybody is first in turn."""
    at = round_ % len(names) if names else 0
    return names[at:] + names[:at]


class Series:
    """Rounds as they come, and who failed at what."""

    def __init__(self, bench, say):
        self.bench, self.rounds, self.failed, self.say = bench, [], [], say

    def note(self, load, proxy, round_, measured):
        """Runs one measurement; gives its figures, or None."""
        try:
            speed, line = self.bench.speed()
            figures, failures = measured()
            figures |= {"probe_us": speed, "line_ns": line}
        except Failed as e:
            self.failed.append(f"{load}, {proxy}: {e}")
            self.say(f"{load:8} {proxy:15} failed: {e}")
            return None
        self.rounds.append({"load": load, "proxy": proxy, "round": round_, "failures": failures, "figures": figures})
        if failures:
            self.failed.append(f"{load}, {proxy}: {failures} failed requests in round {round_ + 1}")
        self.say(f"{load:8} {proxy:15} round {round_ + 1}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()))
        return figures

    def started(self, bench, names, pairs=False):
        """Those proxies that start."""
        running = {}
        for name in names:
            try:
                running[name] = bench.proxy(name, pairs)
            except Failed as e:
                self.failed.append(f"start of {name}: {e}")
                self.say(f"{name} is left out: {e}")
        return running


def latency(bench, series, running):
    """Latency at half of what the slowest of them can do, and what a direct connection has at that rate."""
    rate = bench.options.rate
    if not rate:
        able = []
        for name, proxy in running.items():
            known = [r["figures"]["rate"] for r in series.rounds if r["load"] == "small" and r["proxy"] == name]
            able.append(max(known) if known else bench.saturated("small", proxy, 1)[0]["rate"])
        rate = min(able) / 2
    for r in range(bench.options.rounds):
        direct = series.note("latency", "direct", r, lambda: at_rate(bench, bench.workers.ports[0], rate))
        for name in turns(list(running), r):
            series.note("latency", name, r, lambda name=name: at_rate(bench, running[name].port, rate, direct))


def at_rate(bench, port, rate, direct=None):
    """Percentiles at a rate, less those of a direct connection in the same round."""
    found = bench.paced(port, rate)
    names = ("p50", "p99", "p999")
    figures = {name: found[name] - (direct[name] if direct else 0) for name in names}
    return figures | {"max": found["max"], "rate": rate}, found["failures"]


def measure(bench, series):
    """All loads that were asked for."""
    options = bench.options
    plain = [load for load in options.loads if load in SATURATING and load != "pairs"]
    if plain or "latency" in options.loads:
        running = series.started(bench, options.proxies)
        for load in plain:
            for r in range(options.rounds):
                for name in turns(list(running), r):
                    series.note(load, name, r, lambda: bench.saturated(load, running[name]))
        if "latency" in options.loads and running:
            latency(bench, series, running)
        for proxy in running.values():
            bench.children.end(proxy.child)
    for load in ("idle", "streams"):
        for r in range(min(options.rounds, options.memory_rounds) if load in options.loads else 0):
            for name in turns(options.proxies, r):
                series.note(load, name, r, lambda: bench.held(load, name))
    if "pairs" in options.loads:
        running = series.started(bench, [p for p in options.proxies if p in PAIRING], pairs=True)
        for r in range(options.rounds):
            for name in turns(list(running), r):
                series.note("pairs", name, r, lambda: bench.saturated("pairs", running[name]))
        for proxy in running.values():
            bench.children.end(proxy.child)
