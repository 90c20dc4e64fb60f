"""The proxies that are compared: where they are, and how each is started.

Takes the options of a run, gives command lines. HAProxy with one thread, connections reused always and leastconn, once
as it is and once with the header lines that corelane writes, nginx with one worker and kept connections, corelane with
one lane, gateways from PyPI as they come, and below all of them a relay that only copies. Never starts one."""

import contextlib
import http.client
import json
import os
import pathlib
import shutil
import socket
import subprocess

from processes import Failed, waited_for

PLAIN = ("floor", "haproxy", "haproxy-headers", "nginx", "corelane")
# The program behind a name, where there is another name for it.
PROGRAMS = {"haproxy-headers": "haproxy"}
PEERS = ("smg", "sglang-router", "vllm-router")
# Who speaks SGLang's prefill/decode, which needs no more of workers than an answer to both requests.
PAIRING = ("corelane", "smg", "sglang-router")
PACKAGES = {"haproxy": "haproxy", "nginx": "nginx", "wrk": "wrk", "cc": "build-essential"}


def tool(name):
    """The path of a program, also where only root has it on the path."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin")


def said(command):
    """What a program writes, on one line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).strip().split("\n")[0].strip()


def install_tools(missing):
    """apt-get for programs that are not there."""
    apt = shutil.which("apt-get")
    if not apt:
        raise Failed(f"no apt-get here; install by hand: {' '.join(PACKAGES[m] for m in missing)}")
    root = [] if os.getuid() == 0 else ["sudo", "-n"]
    packages = [PACKAGES[m] for m in missing]
    for step in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", *packages]):
        if subprocess.run([*root, "env", "DEBIAN_FRONTEND=noninteractive", apt, *step], timeout=600).returncode:
            raise Failed(f"apt-get {step[0]} failed; install by hand: {' '.join(packages)}")


def install_peers(venv, peers):
    """pip for the gateways that are not there yet. Each has an environment of its own below `venv`, since
    sglang-router brings a program named smg too."""
    for peer in peers:
        if peer_version(venv, peer):
            continue
        if subprocess.run(["python3", "-m", "venv", "--clear", str(venv / peer)], timeout=120).returncode:
            raise Failed("python3 -m venv failed; on Debian: apt-get install python3-venv")
        if subprocess.run([str(venv / peer / "bin/python"), "-m", "pip", "install", "-q", peer], timeout=900).returncode:
            raise Failed(f"pip could not install {peer}")


def peer_version(venv, peer):
    code = f"import importlib.metadata as m; print(m.version({peer!r}))"
    found = said([str(venv / peer / "bin/python"), "-c", code])
    return found if found[:1].isdigit() else ""


def version(name, options):
    """What a proxy says of itself; empty when it is not there."""
    if name in PEERS:
        return (found := peer_version(options.venv, name)) and f"{name} {found}"
    if name == "corelane":
        return said([str(options.corelane), "--version"])
    if name == "floor":
        return "a bare relay"
    return said([path, "-v"]).removeprefix("nginx version: ") if (path := tool(PROGRAMS.get(name, name))) else ""


class Ports:
    """Free ports on loopback, one after the other."""

    def __init__(self, first):
        self.next = first

    def take(self, count=1):
        """The first of so many free ones in a row."""
        first, have = self.next, 0
        while have < count:
            if self.next > 65535:
                raise Failed("no free ports")
            with socket.socket() as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    s.bind(("127.0.0.1", self.next))
                    have += 1
                except OSError:
                    first, have = self.next + 1, 0
            self.next += 1
        return first


# What corelane writes with every request that has no such lines yet: the client's address and scheme, and a random id of
# 128 bits for the worker and the client.
HEADERS = """
  unique-id-format %[uuid()]
  option forwardfor
  http-request set-header x-forwarded-proto http
  http-request set-header x-request-id %[unique-id]
  http-response set-header x-request-id %[unique-id]"""


def haproxy(work, port, workers, files, headers=""):
    servers = "\n".join(f"  server w{i} 127.0.0.1:{w}" for i, w in enumerate(workers))
    path = work / f"haproxy-{port}.cfg"
    path.write_text(f"""global
  nbthread 1
  maxconn {files // 2 - 100}
defaults
  mode http
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  http-reuse always
  # Else events wait up to 200 ms for the next one, in the hope of fuller packets.
  option http-no-delay
frontend in
  bind 127.0.0.1:{port}
  default_backend out{headers}
backend out
  balance leastconn
{servers}
""")
    return [tool("haproxy"), "-db", "-f", path]


def nginx(work, port, workers, files):
    servers = "\n".join(f"    server 127.0.0.1:{w};" for w in workers)
    user = "user root;" if os.getuid() == 0 else ""
    path = work / "nginx.conf"
    path.write_text(f"""{user}
daemon off;
worker_processes 1;
pid {work}/nginx.pid;
error_log stderr warn;
events {{ worker_connections {files - 200}; }}
http {{
  access_log off;
  client_body_temp_path {work}/nginx-body;
  proxy_temp_path {work}/nginx-proxy;
  fastcgi_temp_path {work}/nginx-fastcgi;
  uwsgi_temp_path {work}/nginx-uwsgi;
  scgi_temp_path {work}/nginx-scgi;
  upstream out {{
    least_conn;
{servers}
    keepalive 512;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    keepalive_requests 1000000000;
    keepalive_timeout 1h;
    client_max_body_size 0;
    client_body_buffer_size 1m;
    location / {{
      proxy_pass http://out;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_read_timeout 1h;
      proxy_max_temp_file_size 0;
    }}
  }}
}}
""")
    return [tool("nginx"), "-p", work, "-c", path]


def command(name, options, relay, work, ports, workers, pairs):
    """The command line of a proxy, and where it listens. With `pairs` the first half of the workers prefills."""
    port = ports.take()
    urls = [f"http://127.0.0.1:{w}" for w in workers]
    half = len(urls) // 2
    if name == "floor":
        return [relay, port, *workers], port
    if name == "nginx":
        return nginx(work, port, workers, options.files), port
    if PROGRAMS.get(name, name) == "haproxy":
        return haproxy(work, port, workers, options.files, HEADERS if name == "haproxy-headers" else ""), port
    if pairs:
        fleet = ["--pd-disaggregation"]
        for url in urls[:half]:
            fleet += ["--prefill", url, "none"]
        for url in urls[half:]:
            fleet += ["--decode", url]
    else:
        fleet = ["--worker-urls", *urls]
    where = ["--port", port, "--prometheus-port", ports.take(), "--policy", options.policy]
    if name == "corelane":
        return [options.corelane, "serve", "--cores", options.proxy_core, "--log-level", "warn", "--shutdown-settle-secs", 0,
                "--shutdown-grace-period-secs", 0, *where, *fleet], port
    program = {"smg": ["smg", "launch"], "sglang-router": ["sglang-router", "launch"], "vllm-router": ["vllm-router"]}[name]
    quiet = "warning" if name == "vllm-router" else "warn"
    return [options.venv / name / "bin" / program[0], *program[1:], "--host", "127.0.0.1", "--log-level", quiet,
            "--max-concurrent-requests", 65536 if name == "vllm-router" else -1, *where, *fleet], port


class Proxy:
    """A running proxy that has answered a request."""

    def __init__(self, name, options, children, ports, workers, relay, pairs=False):
        line, self.port = command(name, options, relay, children.work, ports, workers, pairs)
        self.name = name
        self.child = children.start(name, line, {options.proxy_core})
        self.cpu, self.resident_kib = self.child.cpu, self.child.resident_kib
        waited_for(f"{name} answered no request with 200", 40, self.child, self.answers)

    def answers(self):
        body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1})
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as c, \
                contextlib.suppress(http.client.HTTPException):
            c.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            return c.getresponse().status == 200
