// Mock workers that cost little: one thread, one port a worker, so that a proxy before them is what gets measured.
//
//   worker FIRST_PORT COUNT
//
// With 0 for the first port each takes any free one. Says "ready" and its ports.
//
// Takes POST requests with a JSON body and gives what its end or its beginning (1 KiB each) asks for:
//   "stream":true                  server-sent events, "max_tokens" (or "max_completion_tokens") of them and [DONE];
//                                  else one JSON answer
//   gap_ms=10 step=1 event_bytes=100 answer_bytes=1048576     in the prompt, because gateways drop what they do not know:
//                                  time between events, whether all streams of a worker write together (a decode step,
//                                  workers one after the other) or each at its own time, text of an event, text of an
//                                  answer that is no stream
// POST /v1/chat/completions/render, as of vLLM, gives made-up token ids, the same for the same four bytes: vllm-router
// asks for them before it chooses.
// GET /stats gives the sums since the start, with requests by port; any other GET an answer that
// satisfies the probes of the gateways. Never reads what a prompt says, never queues, never closes first.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
  MAX_WORKERS = 64,
  TICK_US = 100,      // a slot of the timer wheel
  WHEEL = 16384,      // slots; a later due time goes round more than once
  LOOK = 1024,        // bytes at either end of a body in which controls are looked for
  FILLER = 256 << 10, // bytes of text that are written at once
  BACKLOG = 64 << 10, // bytes not taken by the peer from which events wait
  MAX_IN = 64 << 20,  // longest request
};

typedef struct Conn Conn;
struct Conn {
  int fd, worker, listener;
  char *in; // what has arrived
  size_t in_len, in_room, body_at, body_len;
  int head_known, chunked;
  char *out; // what the peer has not taken, from out_at on
  size_t out_len, out_at, out_room;
  size_t filler; // text bytes still to come after `out`, then `tail`
  int tail;
  int busy, streaming, writable;
  long events_left, gap, event_bytes; // the gap in ticks
  long long due;
  Conn *next, **link; // list of a wheel slot
};

static int epoll, workers, timer;
static Conn *wheel[WHEEL];
static long timers;
static long long wheel_at;
static long requests[MAX_WORKERS], events, text_bytes;
static char filler[FILLER];
static const char TAIL[] = "\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":64,\"completion_tokens\":8,\"total_tokens\":72}}";

static void die(const char *what) {
  perror(what);
  exit(1);
}

static long long now_ticks(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (t.tv_sec * 1000000LL + t.tv_nsec / 1000) / TICK_US;
}

// Lets the timer tick, or not.
static void ticking(int on) {
  struct timespec every = {0, on ? TICK_US * 1000 : 0};
  struct itimerspec when = {every, every};
  if (timerfd_settime(timer, 0, &when, NULL)) die("timer");
}

static void *grown(void *p, size_t *room, size_t need) {
  if (need <= *room) return p;
  *room = need + need / 2;
  p = realloc(p, *room);
  if (!p) die("memory");
  return p;
}

static void watch(Conn *c, int operation, int writing) {
  struct epoll_event e = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.ptr = c};
  if (epoll_ctl(epoll, operation, c->fd, &e)) die("epoll_ctl");
  c->writable = !writing;
}

static void unschedule(Conn *c) {
  if (!c->link) return;
  *c->link = c->next;
  if (c->next) c->next->link = c->link;
  c->link = NULL;
  if (!--timers) ticking(0);
}

static void schedule(Conn *c, long long due) {
  if (!timers++) {
    wheel_at = now_ticks();
    ticking(1);
  }
  c->due = due > wheel_at ? due : wheel_at + 1;
  Conn **slot = &wheel[c->due % WHEEL];
  c->next = *slot;
  if (c->next) c->next->link = &c->next;
  c->link = slot;
  *slot = c;
}

static void closed(Conn *c) {
  unschedule(c);
  close(c->fd);
  free(c->in);
  free(c->out);
  free(c);
}

static void put(Conn *c, const void *bytes, size_t n) {
  c->out = grown(c->out, &c->out_room, c->out_len + n);
  memcpy(c->out + c->out_len, bytes, n);
  c->out_len += n;
}

static void event(Conn *c) {
  static const char BEGIN[] = "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"mock\","
                              "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"";
  static const char END[] = "\"},\"finish_reason\":null}]}\n\n\r\n";
  static const char DONE[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
  if (c->events_left == 0) {
    put(c, DONE, sizeof DONE - 1);
    c->busy = 0;
    requests[c->worker]++;
    return;
  }
  char size[32];
  int n = snprintf(size, sizeof size, "%zx\r\n", sizeof BEGIN - 1 + c->event_bytes + sizeof END - 1 - 2);
  put(c, size, n);
  put(c, BEGIN, sizeof BEGIN - 1);
  put(c, filler, c->event_bytes);
  put(c, END, sizeof END - 1);
  c->events_left--;
  events++;
}

// Writes what it may. Gives 0 when all is out, 1 when the peer has to take something first, -1 at its end.
static int flush(Conn *c) {
  for (;;) {
    if (c->out_at == c->out_len && !c->filler) {
      c->out_at = c->out_len = 0;
      if (c->tail) {
        c->tail = 0;
        put(c, TAIL, sizeof TAIL - 1);
      } else if (c->busy && c->streaming && c->gap == 0) {
        while (c->busy && c->out_len < BACKLOG) event(c);
      } else {
        if (!c->writable) watch(c, EPOLL_CTL_MOD, 0);
        return 0;
      }
    }
    int from_out = c->out_at < c->out_len;
    size_t n = from_out ? c->out_len - c->out_at : c->filler < FILLER ? c->filler : FILLER;
    ssize_t sent = send(c->fd, from_out ? c->out + c->out_at : filler, n, MSG_NOSIGNAL | (c->filler || c->tail ? MSG_MORE : 0));
    if (sent < 0) {
      if (errno != EAGAIN) return -1;
      if (c->writable) watch(c, EPOLL_CTL_MOD, 1);
      return 1;
    }
    if (from_out) c->out_at += sent;
    else c->filler -= sent, text_bytes += sent;
  }
}

static void json(Conn *c, const char *body) {
  char head[160];
  int n = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", strlen(body));
  put(c, head, n);
  put(c, body, strlen(body));
}

static void get(Conn *c) {
  char body[MAX_WORKERS * 24 + 200], *at = body;
  if (!memcmp(c->in, "GET /stats ", 11)) {
    at += sprintf(at, "{\"events\":%ld,\"text_bytes\":%ld,\"requests\":[", events, text_bytes);
    for (int i = 0; i < workers; i++) at += sprintf(at, "%s%ld", i ? "," : "", requests[i]);
    strcpy(at, "]}");
  } else if (!memcmp(c->in, "GET /v1/models ", 15)) {
    strcpy(body, "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1,\"owned_by\":\"mock\"}]}");
  } else {
    strcpy(body, "{\"status\":\"ok\",\"model_path\":\"mock\",\"served_model_name\":\"mock\",\"is_generation\":true}");
  }
  json(c, body);
}

// The number after `name` in the two looked-at parts of a body, else `otherwise`.
static long number(const char *body, size_t len, const char *name, long otherwise) {
  size_t look = len < LOOK ? len : LOOK;
  const char *parts[] = {body + len - look, body};
  for (int i = 0; i < 2; i++) {
    const char *p = memmem(parts[i], look, name, strlen(name));
    if (!p) continue;
    for (p += strlen(name); *p == ' ' || *p == ':' || *p == '='; p++) {}
    return strncmp(p, "true", 4) ? strtol(p, NULL, 10) : 1;
  }
  return otherwise;
}

static void render(Conn *c, const char *body, size_t len) {
  size_t count = len / 4, room = 64 + count * 6;
  char *answer = malloc(room), *at = answer;
  if (!answer) die("memory");
  at += sprintf(at, "{\"request_id\":\"0\",\"token_ids\":[");
  for (size_t i = 0; i < count; i++) {
    uint32_t four;
    memcpy(&four, body + 4 * i, 4);
    at += sprintf(at, "%s%u", i ? "," : "", (four * 2654435761u >> 8) % 32000);
  }
  strcpy(at, "]}");
  json(c, answer);
  free(answer);
}

static void post(Conn *c, const char *body, size_t len) {
  static unsigned spread = 1;
  c->streaming = number(body, len, "\"stream\"", 0) != 0;
  c->gap = number(body, len, "gap_ms=", 0) * 1000 / TICK_US;
  c->busy = 1;
  if (!c->streaming) {
    long bytes = number(body, len, "answer_bytes=", 32);
    static const char BEGIN[] = "{\"id\":\"chatcmpl-0\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"mock\","
                                "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"";
    char head[160];
    int n = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
                     sizeof BEGIN - 1 + bytes + sizeof TAIL - 1);
    put(c, head, n);
    put(c, BEGIN, sizeof BEGIN - 1);
    if (bytes > 4096) c->filler = bytes, c->tail = 1;
    else put(c, filler, bytes), put(c, TAIL, sizeof TAIL - 1), text_bytes += bytes;
    c->busy = 0;
    requests[c->worker]++;
    return;
  }
  static const char HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
                             "transfer-encoding: chunked\r\n\r\n";
  c->events_left = number(body, len, "\"max_tokens\"", number(body, len, "\"max_completion_tokens\"", 16));
  c->event_bytes = number(body, len, "event_bytes=", 4);
  if (c->event_bytes < 0 || c->event_bytes > FILLER) c->event_bytes = FILLER;
  put(c, HEAD, sizeof HEAD - 1);
  if (c->gap <= 0) return; // flush makes the events
  long long now = now_ticks();
  if (number(body, len, "step=", 0)) {
    long long phase = c->gap * c->worker / workers;
    schedule(c, (now - phase) / c->gap * c->gap + c->gap + phase);
  } else {
    spread = spread * 1664525 + 1013904223;
    event(c);
    schedule(c, now + 1 + (spread >> 8) % c->gap);
  }
}

// Length of a chunked body in `from`, which is joined in place; 0 while it is not whole. `used` counts its framing.
static size_t joined(char *from, size_t n, size_t *used, int move) {
  char *p = from, *end = from + n, *to = from;
  for (;;) {
    char *line = memmem(p, end - p, "\r\n", 2);
    if (!line) return 0;
    size_t size = strtoul(p, NULL, 16);
    p = line + 2;
    if (size > MAX_IN || (size_t)(end - p) < size + 2) return 0;
    if (move) memmove(to, p, size);
    to += size;
    p += size + 2;
    if (!size) break;
  }
  *used = p - from;
  return to - from;
}

// Answers the first request of the input if it is whole. Gives -1 for what is no request.
static int served(Conn *c) {
  if (!c->head_known) {
    char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
    if (!end) return 0;
    c->head_known = 1;
    c->body_at = end - c->in + 4;
    c->body_len = c->chunked = 0;
    for (char *line = c->in; line < end;) {
      if (!strncasecmp(line, "content-length:", 15)) c->body_len = strtoul(line + 15, NULL, 10);
      if (!strncasecmp(line, "transfer-encoding:", 18)) c->chunked = 1;
      char *next = memmem(line, end + 2 - line, "\r\n", 2);
      line = next + 2;
    }
    if (c->body_len > MAX_IN) return -1;
  }
  size_t len = c->body_len, used = c->body_len;
  if (c->chunked) {
    if (!joined(c->in + c->body_at, c->in_len - c->body_at, &used, 0)) return 0;
    len = joined(c->in + c->body_at, c->in_len - c->body_at, &used, 1);
  } else if (c->in_len < c->body_at + len) {
    return 0;
  }
  if (!memcmp(c->in, "GET ", 4)) get(c);
  else if (!memcmp(c->in, "POST /v1/chat/completions/render ", 33)) render(c, c->in + c->body_at, len);
  else post(c, c->in + c->body_at, len);
  used += c->body_at;
  memmove(c->in, c->in + used, c->in_len - used);
  c->in_len -= used;
  c->in[c->in_len] = c->head_known = 0;
  return 1;
}

// Gives 0 when the connection is over.
static int readable(Conn *c) {
  for (;;) {
    size_t want = c->head_known && !c->chunked ? c->body_at + c->body_len + 1 : 0;
    if (want < c->in_len + 2048) want = c->in_len + (c->in_len ? 16384 : 2048);
    c->in = grown(c->in, &c->in_room, want);
    size_t room = c->in_room - c->in_len - 1;
    ssize_t n = recv(c->fd, c->in + c->in_len, room, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN)) return 0;
    if (n < 0) break;
    c->in[c->in_len += n] = 0;
    if (c->in_len > MAX_IN) return 0;
    int r = 0;
    while (!c->busy && c->in_len && (r = served(c)) > 0) {}
    if (r < 0) return 0;
    if ((size_t)n < room) break;
  }
  return c->out_at != 0 || !c->out_len || flush(c) >= 0;
}

static void tick(Conn *c) {
  if (c->out_len - c->out_at > BACKLOG) return schedule(c, wheel_at + 1);
  event(c);
  if (c->busy) schedule(c, c->due + c->gap);
  if (flush(c) < 0) closed(c);
}

static void turn_wheel(void) {
  for (long long now = now_ticks(); timers && wheel_at < now;) {
    wheel_at++;
    Conn *list = wheel[wheel_at % WHEEL];
    wheel[wheel_at % WHEEL] = NULL;
    if (list) list->link = &list;
    while (list) { // a connection that ends takes itself out of what is left
      Conn *c = list;
      if (c->due > wheel_at) {
        list = c->next;
        if (list) list->link = &list;
        c->link = NULL;
        timers--;
        schedule(c, c->due);
      } else {
        unschedule(c);
        tick(c);
      }
    }
  }
}

static int listen_at(int port, int worker) {
  Conn *c = calloc(1, sizeof *c);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int on = 1;
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  c->worker = worker;
  c->listener = 1;
  setsockopt(c->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(c->fd, (void *)&at, sizeof at) || listen(c->fd, 4096)) die("listen");
  watch(c, EPOLL_CTL_ADD, 0);
  socklen_t len = sizeof at;
  getsockname(c->fd, (void *)&at, &len);
  return ntohs(at.sin_port);
}

static void accepted(Conn *listener) {
  for (;;) {
    int on = 1, fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    Conn *c = calloc(1, sizeof *c);
    if (!c) die("memory");
    c->fd = fd;
    c->worker = listener->worker;
    watch(c, EPOLL_CTL_ADD, 0);
  }
}

int main(int argc, char **argv) {
  int first = argc == 3 ? atoi(argv[1]) : -1;
  workers = argc == 3 ? atoi(argv[2]) : 0;
  if (first < 0 || workers < 1 || workers > MAX_WORKERS || first + workers > 65536) {
    fprintf(stderr, "usage: %s FIRST_PORT COUNT (at most %d)\n", argv[0], MAX_WORKERS);
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  memset(filler, 'x', sizeof filler);
  epoll = epoll_create1(EPOLL_CLOEXEC);
  timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
  struct epoll_event on_tick = {.events = EPOLLIN};
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &on_tick)) die("timer");
  printf("ready");
  for (int i = 0; i < workers; i++) printf(" %d", listen_at(first ? first + i : 0, i));
  puts("");
  fflush(stdout);
  for (struct epoll_event ready[256];;) {
    int n = epoll_wait(epoll, ready, 256, -1);
    if (n < 0 && errno != EINTR) die("epoll_wait");
    for (int i = 0; i < n; i++) {
      Conn *c = ready[i].data.ptr;
      uint64_t ticks;
      if (!c && read(timer, &ticks, sizeof ticks) < 0 && errno != EAGAIN) die("timer");
      if (!c) continue;
      if (c->listener) accepted(c);
      else if (((ready[i].events & EPOLLOUT) && flush(c) < 0) || ((ready[i].events & ~EPOLLOUT) && !readable(c))) closed(c);
    }
    turn_wheel();
  }
}
