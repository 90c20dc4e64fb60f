// A bare relay, which passes bytes on and looks at none: what copying through the kernel's TCP costs by itself.
//
//   relay PORT WORKER_PORT...
//
// With 0 for the port it takes any free one. Says "ready" and its port.
//
// Takes connections on loopback and opens one to a worker for each, the workers in turn; gives each side what the other
// sent, byte for byte, and closes both when one ends and what it had sent is out. One thread, epoll edge-triggered, one
// receive and one send for what came at once. Where a side takes no more, the rest is kept and the other side is not
// read until it is out. Never parses, never balances or retries, never keeps a worker's connection for another client:
// a lower bound for proxies that copy what comes when it comes, no gateway. Who moves pages (splice), or waits for more
// and moves it at once, can do with less.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
  MAX_FILES = 65536, // a side is found by its descriptor
  MAX_WORKERS = 64,
  ROOM = 64 << 10, // bytes that are received at once
};

typedef struct {
  int peer;  // descriptor of the other side, 0 where nothing is open
  int ended; // sends no more, closes when the peer has taken `held`
  size_t at, len;
  char *held; // what the peer has not taken, from `at` to `len`; NULL when all is out
} Side;

static int epoll;
static Side sides[MAX_FILES];
static char room[ROOM];

static void die(const char *what) {
  perror(what);
  exit(1);
}

static void closed(int fd) {
  int both[] = {fd, sides[fd].peer};
  for (int i = 0; i < 2; i++) {
    free(sides[both[i]].held);
    sides[both[i]] = (Side){0};
    close(both[i]);
  }
}

// Bytes that `to` took, none while it has no room, -1 at its end.
static ssize_t gave(int to, const char *bytes, size_t n) {
  ssize_t sent = send(to, bytes, n, MSG_NOSIGNAL);
  return sent < 0 && errno == EAGAIN ? 0 : sent;
}

// Moves what `fd` sent until there is no more of it or its peer takes no more. `at_end`: the end is known to be there,
// and is read too. Gives 0 when both are over.
static int moved(int fd, int at_end) {
  Side *s = &sides[fd];
  for (;;) {
    ssize_t n = recv(fd, room, ROOM, 0);
    if (n < 0) return errno == EAGAIN;
    if (n == 0) return 0;
    ssize_t sent = gave(s->peer, room, n);
    if (sent < 0) return 0;
    if (sent < n) {
      s->at = 0;
      s->len = n - sent;
      s->held = malloc(s->len);
      if (!s->held) die("memory");
      memcpy(s->held, room + sent, s->len);
      s->ended |= at_end;
      return 1;
    }
    if (n < ROOM && !at_end) return 1; // the next byte is an event of its own
  }
}

// Sends what is kept for `fd`'s peer, then goes on. Gives 0 when both are over.
static int resumed(int fd) {
  Side *s = &sides[fd];
  ssize_t sent = gave(s->peer, s->held + s->at, s->len - s->at);
  if (sent < 0) return 0;
  s->at += sent;
  if (s->at < s->len) return 1;
  free(s->held);
  s->held = NULL;
  return moved(fd, s->ended);
}

static void watch(int fd) {
  // Both from the start: an edge for writing comes only after a send that found no room.
  struct epoll_event e = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.fd = fd};
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e)) die("epoll_ctl");
}

static void happened(int fd, unsigned events) {
  Side *s = &sides[fd];
  if (!s->peer) return; // closed by an event before this one
  int over = (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
  if ((events & EPOLLOUT) && sides[s->peer].held && !resumed(s->peer)) return closed(fd);
  // While something is kept for the peer, the end waits behind it.
  if (s->held) s->ended |= over;
  else if ((over || (events & EPOLLIN)) && !moved(fd, over)) closed(fd);
}

static void accepted(int listener, int *ports, int workers) {
  static int turn;
  for (;;) {
    int on = 1, client = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (client < 0 && (errno == EAGAIN || errno == ECONNABORTED)) return;
    int worker = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (client < 0 || worker < 0) die("accept");
    if (client >= MAX_FILES || worker >= MAX_FILES) errno = EMFILE, die("accept");
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(ports[turn++ % workers]), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (connect(worker, (void *)&at, sizeof at) && errno != EINPROGRESS) die("connect");
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(worker, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    sides[client].peer = worker;
    sides[worker].peer = client;
    watch(client);
    watch(worker);
  }
}

int main(int argc, char **argv) {
  int ports[MAX_WORKERS], workers = argc - 2;
  if (workers < 1 || workers > MAX_WORKERS) {
    fprintf(stderr, "usage: %s PORT WORKER_PORT... (at most %d)\n", argv[0], MAX_WORKERS);
    return 2;
  }
  for (int i = 0; i < workers; i++) ports[i] = atoi(argv[2 + i]);
  epoll = epoll_create1(EPOLL_CLOEXEC);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener, (void *)&at, sizeof at) || listen(listener, 4096)) die("listen");
  struct epoll_event waiting = {.events = EPOLLIN, .data.fd = listener};
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &waiting)) die("epoll_ctl");
  socklen_t len = sizeof at;
  getsockname(listener, (void *)&at, &len);
  printf("ready %d\n", ntohs(at.sin_port));
  fflush(stdout);
  for (struct epoll_event ready[256];;) {
    int n = epoll_wait(epoll, ready, 256, -1);
    if (n < 0 && errno != EINTR) die("epoll_wait");
    for (int i = 0; i < n; i++) {
      int fd = ready[i].data.fd;
      if (fd == listener) accepted(listener, ports, workers);
      else happened(fd, ready[i].events);
    }
  }
}
