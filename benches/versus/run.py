#!/usr/bin/env python3
"""What corelane costs beside other proxies, on this machine: one command.

    python3 benches/versus/run.py --quick
    python3 benches/versus/run.py --loads small,stream --proxies haproxy,corelane --rounds 7
    python3 benches/versus/run.py --peers smg,sglang-router --loads small,pairs
    python3 benches/versus/run.py --loads small --steer
    python3 benches/versus/run.py --from target/versus/rounds.json

floor is a relay that only copies: what a proxy pays that receives and sends each piece as it comes. haproxy-headers is
HAProxy with the header lines that corelane writes where a client sent none.

On loopback the sender's core does the receiver's share of TCP too. --steer has every side receive on the core where it reads
(RFS, host-wide while the run lasts); that takes interrupts between the cores, of which proxies cause unlike numbers.

Every proxy gets one core, workers and load generators another (or several), and all take turns under the same load, in
several rounds. A table is printed; rounds.json and picture.svg are written. Quote ratios of one run: absolute times
depend on the machine and on its neighbours.

loads: small    small JSON requests                      CPU time a request
       stream   256 SSE streams, an event each 10 ms     CPU time an event
       bursts   the same, as decode steps write them     CPU time an event
       long     128 KiB prompts                          CPU time a request
       answer   1 MiB answers                            bytes a CPU second
       latency  small JSON at half load, a fixed rate    latency added to a direct connection: p50, p99, p99.9
       idle     keep-alive connections without requests  process memory of each
       streams  many slow streams                        process memory of each, CPU time an event
       pairs    small JSON, prefill and decode workers   CPU time a request (corelane, smg, sglang-router)"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import platform
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]

import loads  # noqa: E402  (what stands beside this file, without leaving bytecode there)
import proxies  # noqa: E402
import report  # noqa: E402
import steering  # noqa: E402
from processes import Children, Failed  # noqa: E402

ALL_LOADS = [load for load, *_ in report.LOADS]


def cores(words):
    """Cores such as 1 or 1,2 or 2-5."""
    found = set()
    for part in words.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def among(known):
    def parse(words):
        names = [w for w in words.split(",") if w]
        if unknown := [n for n in names if n not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
        return list(dict.fromkeys(names))
    return parse


def parsed(arguments):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="two short rounds, few connections: little over a minute; says little")
    p.add_argument("--check", action="store_true", help="build what has to be built, tell what is found, measure nothing")
    p.add_argument("--from", dest="saved", nargs="+", metavar="FILE", help="measure nothing: table and picture of saved rounds")
    p.add_argument("--loads", type=among(ALL_LOADS), default=ALL_LOADS, metavar="NAME,…", help="default: all")
    p.add_argument("--proxies", type=among(proxies.PLAIN + proxies.PEERS), metavar="NAME,…",
                   help=f"default: {','.join(proxies.PLAIN)} as far as they are found, and --peers")
    p.add_argument("--peers", type=among(proxies.PEERS), default=[], metavar="NAME,…",
                   help=f"gateways to install from PyPI and to compare: {', '.join(proxies.PEERS)}")
    p.add_argument("--install", action="store_true", help="apt-get what is missing of haproxy, nginx, wrk and a C compiler")
    p.add_argument("--base", default="corelane", help="second proxy that ratios are given to [corelane]")
    p.add_argument("--rounds", type=int, help="[5]")
    p.add_argument("--seconds", type=float, help="of each measurement [3]")
    p.add_argument("--rate", type=float, default=0, help="of latency, requests/s [half of the slowest proxy's throughput]")
    p.add_argument("--connections", type=int, help="of idle and streams [9000, or what NOFILE allows]")
    p.add_argument("--proxy-core", type=int, default=0, metavar="CORE", help="[0]")
    p.add_argument("--load-core", type=cores, default={1}, metavar="CORES", dest="load_cores", help="[1]")
    p.add_argument("--steer", action="store_true",
                   help="loopback receives on the core of who reads (RFS; needs root)")
    p.add_argument("--workers", type=int, default=4, help="mock workers; of pairs half are prefill workers [4]")
    p.add_argument("--policy", default="cache_aware", help="of corelane and the gateways [cache_aware]")
    p.add_argument("--corelane", type=pathlib.Path, default=ROOT / "target/release/corelane", metavar="PATH",
                   help="[target/release/corelane]")
    p.add_argument("--venv", type=pathlib.Path, default=ROOT / "target/versus-venv", metavar="DIR",
                   help="where gateways are installed, each apart [target/versus-venv]")
    p.add_argument("--ports", type=int, default=19200, metavar="FIRST", help="free ones are taken from here on [19200]")
    p.add_argument("--out", type=pathlib.Path, default=ROOT / "target/versus", metavar="DIR", help="[target/versus]")
    o = p.parse_args(arguments)
    o.rounds = o.rounds or (2 if o.quick else 5)
    o.seconds = o.seconds or (0.5 if o.quick else 3.0)
    o.warmup = 0.2 if o.quick else 0.7
    o.settle = 0.3 if o.quick else 6.0
    o.memory_rounds = 1 if o.quick else 3
    o.files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    o.files = 65536 if o.files == resource.RLIM_INFINITY else min(o.files, 65536)
    allowed = (o.files - 600) // 2 - loads.WARM
    o.connections = min(o.connections or (1000 if o.quick else 9000), allowed)
    if not 1 <= o.rounds <= 1000 or not 0.1 <= o.seconds <= 600 or not 2 <= o.workers <= 64:
        p.error("rounds are 1 to 1000, seconds 0.1 to 600, workers 2 to 64")
    if o.connections < 1:
        p.error(f"NOFILE of {o.files} is too low")
    o.corelane, o.venv, o.out = o.corelane.absolute(), o.venv.absolute(), o.out.absolute()
    return o


def needed(options):
    """The programs of this run that are not there."""
    tools = ["cc"] + (["wrk"] if not set(options.loads) <= {"idle", "streams"} else [])
    asked = {proxies.PROGRAMS.get(name, name) for name in options.proxies or proxies.PLAIN}
    tools += [name for name in ("haproxy", "nginx") if name in asked]
    return [name for name in tools if not proxies.tool(name)]


def chosen(options):
    """Proxies by name, with their versions; those that nobody named may be missing."""
    asked = options.proxies
    names = (asked or list(proxies.PLAIN)) + options.peers
    versions = {name: proxies.version(name, options) for name in dict.fromkeys(names)}
    for name in [n for n, v in versions.items() if not v]:
        how = (f"build it: cargo build --release --locked (looked at {options.corelane})" if name == "corelane" else
               f"--peers {name} installs it below {options.venv}" if name in proxies.PEERS else
               f"apt-get install {proxies.PACKAGES[proxies.PROGRAMS.get(name, name)]}, or --install")
        if asked or name == "corelane":
            raise Failed(f"{name} is missing; {how}")
        print(f"without {name}, which is missing; {how}", file=sys.stderr)
        del versions[name]
    return versions


def built(work):
    """The C parts, compiled."""
    compiler = proxies.tool("cc")
    if not compiler:
        raise Failed("a C compiler (cc) is missing; apt-get install build-essential, or --install")
    parts = ("worker", "load", "relay")
    for name in parts:
        done = subprocess.run([compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", work / name, HERE / f"{name}.c",
                               "-lm", "-pthread"],
                              capture_output=True, text=True, timeout=60)
        if done.returncode or done.stderr:
            raise Failed(f"{name}.c does not compile:\n{done.stderr}")
    return {name: work / name for name in parts} | {"wrk": proxies.tool("wrk")}


def machine():
    model = next((line.partition(":")[2].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()}


def check(options, children, tools):
    """Shows that the parts work, and tells what a run would find."""
    for name in ("haproxy", "nginx", "wrk", "corelane", *proxies.PEERS):
        where = options.corelane if name == "corelane" else options.venv / name if name in proxies.PEERS else proxies.tool(name)
        found = proxies.version(name, options) if name != "wrk" else where and proxies.said([where, "-v"])
        print(f"{name:15} {f'{found}  ({where})' if found else 'missing'}")
    if options.steer:
        with steering.steered():
            print("steering works: switched on and back")
    bench = loads.Bench(options, children, proxies.Ports(options.ports), tools)
    options.seconds, options.warmup = 0.2, 0
    found = bench.paced(bench.workers.ports[0], 500)
    answered = sum(bench.workers.counted()["requests"])
    if found["failures"] or answered != found["measured"]:
        raise Failed(f"the workers answered {answered} requests, the load generator says {found}")
    through = relayed(children, tools, bench)
    rounds = [{"load": "latency", "proxy": "direct", "round": 0, "failures": 0, "figures": {k: found[k] for k in ("p50", "p99", "p999")}
               | {"rate": 500}}]
    if "direct" not in report.table(rounds, options.base) or "</svg>" not in report.picture(rounds, ""):
        raise Failed("no report")
    print(f"worker and load work: {answered} requests straight to the workers, p50 {found['p50']:.0f} µs")
    print(f"relay works: {through} bytes as they came to a client that was slow to read")


def relayed(children, tools, bench):
    """Has a request and an answer that fill all sockets on the way copied; gives how many bytes those were."""
    relay = children.start("relay", [tools["relay"], 0, *bench.workers.ports], {bench.options.proxy_core}, piped=True)
    body, answers = loads.body(f"answer_bytes={16 << 20} ", user="x" * (8 << 20)), []
    for port in (bench.workers.ports[0], int(relay.line(5).split()[1])):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as c:
            try:
                c.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
                time.sleep(0.2)
                answers.append(c.getresponse().read())
            except (OSError, http.client.HTTPException) as e:
                raise Failed(f"{'the relay' if answers else 'a worker'} did not answer: {e!r}") from None
    if answers[0] != answers[1] or len(answers[0]) < 16 << 20:
        raise Failed(f"{len(answers[0])} bytes came straight from a worker, {len(answers[1])} or others through the relay")
    return len(body) + len(answers[1])


def written(options, record):
    options.out.mkdir(parents=True, exist_ok=True)
    where, about = record["machine"], record["versions"]
    line = f"{where['cpu']}, {where['cores']} cores, Linux {where['kernel']}; " + ", ".join(dict.fromkeys(about.values()))
    line += "; loopback receives on the reader's core" if record.get("steered") else ""
    (options.out / "rounds.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    (options.out / "picture.svg").write_text(report.picture(record["rounds"], line))
    print(line + report.table(record["rounds"], options.base))
    print(f"\nwritten: {options.out}/rounds.json, {options.out}/picture.svg")


def joined(paths):
    """Rounds of several runs, under the machine of the first."""
    record = None
    for path in paths:
        try:
            more = json.loads(pathlib.Path(path).read_text())
        except (OSError, ValueError) as e:
            raise Failed(f"{path} has no rounds of a run: {e}") from None
        record = record or {**more, "rounds": [], "versions": {}, "commands": [], "failed": []}
        if record.get("steered", False) != more.get("steered", False):
            raise Failed(f"{path} was measured {'with' if more.get('steered') else 'without'} --steer, the first file was not: "
                         "they cannot be put together")
        # The same load measured in two runs counts as further rounds, never as the same ones.
        seen = {}
        for r in record["rounds"]:
            seen[r["load"]] = max(seen.get(r["load"], 0), r["round"] + 1)
        record["rounds"] += [{**r, "round": r["round"] + seen.get(r["load"], 0)} for r in more["rounds"]]
        record["versions"] |= more["versions"]
        record["commands"] += more["commands"]
        record["failed"] += more["failed"]
    return record


def measured(options, children, tools, versions):
    apart = os.sched_getaffinity(0)
    if options.proxy_core in options.load_cores or not options.load_cores | {options.proxy_core} <= apart:
        raise Failed(f"core {options.proxy_core} for the proxy and {sorted(options.load_cores)} for the load: they must differ "
                     f"and be among {sorted(apart)} (--proxy-core, --load-core)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (options.files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    record = {"machine": machine(), "versions": versions, "commands": [shlex.join(sys.argv)], "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
              "policy": options.policy, "steered": options.steer, "workers": options.workers, "seconds": options.seconds}
    os.sched_setaffinity(0, options.load_cores)
    options.proxies = list(versions)
    bench = loads.Bench(options, children, proxies.Ports(options.ports), tools)
    series = loads.Series(bench, lambda words: print(words, file=sys.stderr, flush=True))
    try:
        with steering.steered() if options.steer else contextlib.nullcontext():
            loads.measure(bench, series)
    finally:
        if series.rounds:
            written(options, {**record, "failed": series.failed, "rounds": series.rounds})
    for words in series.failed:
        print(f"failed: {words}", file=sys.stderr)
    return 1 if series.failed or not series.rounds else 0


def main():
    options = parsed(sys.argv[1:])
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.default_int_handler)
    try:
        if options.saved:
            written(options, joined(options.saved))
            return 0
        if options.install and (missing := needed(options)):
            proxies.install_tools(missing)
        if options.peers:
            proxies.install_peers(options.venv, options.peers)
        with tempfile.TemporaryDirectory(prefix="versus-") as work, Children(work) as children:
            tools = built(pathlib.Path(work))
            if options.check:
                check(options, children, tools)
                return 0
            if not tools["wrk"] and "wrk" in needed(options):
                raise Failed("wrk is missing; apt-get install wrk, or --install")
            began = time.monotonic()
            code = measured(options, children, tools, chosen(options))
            print(f"took {time.monotonic() - began:.0f} s")
            return code
    except Failed as e:
        print(f"versus: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("versus: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
