#!/usr/bin/env python3
"""Process memory of an idle keep-alive connection: benches/idle.py PORT PID [CONNECTIONS=9000].

Opens the connections, sends one small request on each, waits, and divides the growth of the resident size."""
import socket
import sys
import time

if len(sys.argv) not in (3, 4) or not all(arg.isdigit() for arg in sys.argv[1:]):
    sys.exit(f"usage: {sys.argv[0]} PORT PID [CONNECTIONS=9000]\n"
             "PORT: where a gateway listens on loopback; PID: its process; CONNECTIONS: how many are opened")
port, pid, count = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 9000
body = b'{"model":"mock","messages":[{"role":"user","content":"hi"}],"max_tokens":1}'
request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
request += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def resident_kib():
    with open(f"/proc/{pid}/smaps_rollup") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("Rss:"))


def opened(n):
    sockets = []
    for _ in range(n):
        s = socket.create_connection(("127.0.0.1", port))
        s.sendall(request)
        if b" 200 " not in s.recv(65536):
            sys.exit("a request was not answered with 200")
        sockets.append(s)
    return sockets


warm = opened(200)
time.sleep(2)
before = resident_kib()
idle = opened(count)
time.sleep(6)
after = resident_kib()
print(f"{before} -> {after} KiB: {(after - before) / count:.2f} KiB for each of {count} idle connections")
