// A load generator for what wrk cannot do: a fixed rate, and connections that are held. One thread, epoll.
//
//   load rate PORT BODY CONNECTIONS RATE SECONDS WARMUP
//   load hold PORT BODY WARM COUNT idle|stream
//   load probe CORE OTHER
//
// Takes a port on loopback and a file with a JSON body that is posted to /v1/chat/completions.
//
// rate: requests are due at times drawn beforehand (exponential gaps, always the same), whatever became of those
// before; each takes a free connection or waits for one. The latency counts from the time when a request was due, so
// that a proxy that stalls cannot hide what would have come meanwhile (coordinated omission). Gives one line of JSON,
// times in µs; what was due in the first WARMUP seconds is left out.
//
// hold: opens WARM connections, says "warm", waits for a line; opens COUNT more, says "ready", and reads on until its
// standard input ends. idle: each connection had one answer. stream: each has an answer that goes on.
// probe: the time in µs that a message through a pair of sockets takes on CORE, and the time in ns that a cache line takes
// to OTHER and back, least of several each, which tell how fast the machine happens to be and how near its cores are.
// Never retries: a refused connection or another status than 200 is an error.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
  MAX_HEAD = 4096,  // longest answer head
  OPENING = 32,     // connections of `hold` that wait for their first answer at once
  PATIENCE_S = 60,  // how long `hold` may take to open
  LEFT_BEHIND_S = 5 // how long after the last due time answers are waited for
};

// HEAD: a head arrives. LENGTH: `left` bytes. The others are parts of the chunked coding.
enum state { HEAD, LENGTH, SIZE, CHUNK, CHUNK_END, TRAILER };

typedef struct {
  int fd, busy, counted;
  enum state state;
  uint64_t left, line; // bytes of the body or chunk to come; bytes of the line so far
  size_t head_len, sent;
  int64_t due_ns;
  char head[MAX_HEAD];
} Conn;

static int epoll, port;
static char *request;
static size_t request_len;
static long failures;
static const char *last_failure = "";

static void die(const char *what) {
  perror(what);
  exit(1);
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void made_request(const char *path) {
  FILE *f = fopen(path, "rb");
  if (!f || fseek(f, 0, SEEK_END)) die(path);
  long len = ftell(f);
  rewind(f);
  request = malloc(len + 256);
  int head = sprintf(request,
                     "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                     "content-length: %ld\r\n\r\n",
                     port, len);
  if (fread(request + head, 1, len, f) != (size_t)len) die(path);
  fclose(f);
  request_len = head + len;
}

static void watch(Conn *c, int operation, int writing) {
  struct epoll_event e = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.ptr = c};
  if (epoll_ctl(epoll, operation, c->fd, &e)) die("epoll_ctl");
}

static void opened(Conn *c) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int on = 1;
  memset(c, 0, offsetof(Conn, head));
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (c->fd < 0) die("socket");
  if (connect(c->fd, (void *)&to, sizeof to)) die("connect");
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  fcntl(c->fd, F_SETFL, O_NONBLOCK);
  watch(c, EPOLL_CTL_ADD, 0);
}

// Sends what it may of the request. Gives 0 at the peer's end.
static int sent(Conn *c) {
  ssize_t n = send(c->fd, request + c->sent, request_len - c->sent, MSG_NOSIGNAL);
  if (n < 0 && errno != EAGAIN) return 0;
  int partly = c->sent > 0;
  if (n > 0) c->sent += n;
  if (c->sent < request_len) watch(c, EPOLL_CTL_MOD, 1);
  else if (partly) watch(c, EPOLL_CTL_MOD, 0);
  return 1;
}

// Takes the head that stands in c->head. Gives NULL, or what is wrong.
static const char *headed(Conn *c) {
  static char text[64];
  int chunked = 0;
  long length = -1;
  if (c->head_len < 12 || memcmp(c->head, "HTTP/1.", 7)) return "no HTTP answer";
  if (memcmp(c->head + 9, "200", 3)) {
    snprintf(text, sizeof text, "status %.3s", c->head + 9);
    return text;
  }
  for (char *line = strstr(c->head, "\r\n") + 2; *line && *line != '\r'; line = strstr(line, "\r\n") + 2) {
    if (!strncasecmp(line, "content-length:", 15)) length = strtol(line + 15, NULL, 10);
    if (!strncasecmp(line, "transfer-encoding:", 18)) chunked = 1;
  }
  if (!chunked && length < 0) return "an answer without length";
  c->state = chunked ? SIZE : LENGTH;
  c->left = chunked ? 0 : length;
  c->line = 0;
  return NULL;
}

// Walks over bytes of an answer. Gives 1 when it is whole, 0 before, -1 with `last_failure` set when it is wrong.
static int walked(Conn *c, const char *p, size_t n) {
  for (const char *end = p + n; p < end || (c->state == LENGTH && !c->left);) {
    uint64_t have = end - p, step = c->left < have ? c->left : have;
    switch (c->state) {
    case HEAD:
      if (c->head_len + 1 >= MAX_HEAD) return last_failure = "a head too long", -1;
      c->head[c->head_len++] = *p++;
      c->head[c->head_len] = 0;
      if (c->head_len >= 4 && !memcmp(c->head + c->head_len - 4, "\r\n\r\n", 4)) {
        const char *wrong = headed(c);
        if (wrong) return last_failure = wrong, -1;
      }
      break;
    case LENGTH:
      p += step;
      if (!(c->left -= step)) return 1;
      break;
    case SIZE:
      if (*p == '\n') c->state = c->left ? CHUNK : TRAILER, c->line = 0;
      else if (*p != '\r' && !c->line) {
        int digit = *p <= '9' ? *p - '0' : (*p | 32) - 'a' + 10;
        if (digit < 0 || digit > 15) c->line = 1; // an extension
        else c->left = c->left * 16 + digit;
      }
      p++;
      break;
    case CHUNK:
      p += step;
      if (!(c->left -= step)) c->state = CHUNK_END;
      break;
    case CHUNK_END:
      if (*p++ == '\n') c->state = SIZE, c->left = c->line = 0;
      break;
    case TRAILER:
      if (*p == '\n' && !c->line) return 1;
      c->line = *p == '\n' ? 0 : c->line + (*p != '\r');
      p++;
      break;
    }
  }
  return 0;
}

// Reads what is there. As `walked`; the peer's end is wrong too.
static int received(Conn *c) {
  static char buffer[256 << 10];
  for (;;) {
    ssize_t n = recv(c->fd, buffer, sizeof buffer, 0);
    if (n < 0 && errno == EAGAIN) return 0;
    if (n <= 0) return last_failure = "the connection was closed", -1;
    int r = walked(c, buffer, n);
    if (r) return r;
    if ((size_t)n < sizeof buffer) return 0;
  }
}

static void fresh(Conn *c) {
  c->state = HEAD;
  c->head_len = c->sent = 0;
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static int rate(int connections, double per_second, double seconds, double warmup) {
  long count = per_second * seconds, due = 0, done = 0, measured = 0, n_free = 0;
  int64_t *at = malloc(count * sizeof *at), start = now_ns() + 20000000;
  double *latency = malloc(count * sizeof *latency), t = 0;
  Conn *all = calloc(connections, sizeof *all), **free_ring = malloc(connections * sizeof *free_ring);
  long first_free = 0;
  uint64_t random = 0x9E3779B97F4A7C15u;
  if (count < 1 || connections < 1 || !at || !latency || !all || !free_ring) die("nothing to do, or no memory");
  for (long i = 0; i < count; i++) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    t -= log(((random >> 11) + 1) / 9007199254740993.0) / per_second;
    at[i] = t * 1e9;
  }
  for (int i = 0; i < connections; i++) {
    opened(&all[i]);
    free_ring[n_free++] = &all[i];
  }
  start = now_ns() + 20000000;
  int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
  struct epoll_event on_timer = {.events = EPOLLIN, .data.ptr = NULL}, ready[256];
  epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &on_timer);
  int64_t end = start + at[count - 1] + LEFT_BEHIND_S * 1000000000LL, armed = 0, now;
  double latest = 0;
  while (done < count && (now = now_ns()) < end) {
    while (due < count && n_free && start + at[due] <= now) {
      Conn *c = free_ring[first_free];
      first_free = (first_free + 1) % connections;
      n_free--;
      fresh(c);
      c->busy = 1;
      c->due_ns = start + at[due++];
      if (now - c->due_ns > latest) latest = now - c->due_ns;
      if (!sent(c)) last_failure = "the connection was closed"; // which reading tells too
    }
    int64_t wake = due < count && n_free ? start + at[due] : now + 100000000;
    if (wake != armed) {
      struct itimerspec when = {.it_value = {wake / 1000000000, wake % 1000000000}};
      timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL);
      armed = wake;
    }
    int n = epoll_wait(epoll, ready, 256, 200);
    for (int i = 0; i < n; i++) {
      Conn *c = ready[i].data.ptr;
      uint64_t expired;
      if (!c) {
        if (read(timer, &expired, sizeof expired) < 0 && errno != EAGAIN) die("timer");
        armed = 0;
        continue;
      }
      if ((ready[i].events & EPOLLOUT) && c->busy) sent(c);
      if (!(ready[i].events & ~EPOLLOUT)) continue;
      int r = received(c);
      if (!r) continue;
      int was_busy = c->busy;
      int64_t due_ns = c->due_ns;
      if (r < 0) {
        if (was_busy) failures++;
        close(c->fd);
        opened(c);
      } else if (due_ns - start >= warmup * 1e9) {
        latency[measured++] = (now_ns() - due_ns) / 1e3;
      }
      c->busy = 0;
      if (was_busy) {
        done++;
        free_ring[(first_free + n_free++) % connections] = c;
      }
    }
  }
  failures += count - done;
  if (done < count) last_failure = "no answer in time";
  qsort(latency, measured, sizeof *latency, by_size);
#define AT(q) (measured ? latency[(long)(q * (measured - 1) + 0.5)] : 0.0)
  printf("{\"measured\":%ld,\"failures\":%ld,\"failure\":\"%s\",\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"p999\":%.1f,\"max\":%.1f,"
         "\"late_max\":%.1f}\n",
         measured, failures, last_failure, AT(.5), AT(.9), AT(.99), AT(.999), AT(1), latest / 1e3);
  return 0;
}

static int hold(int warm, int count, int streams) {
  int total = warm + count, begun = 0, answered = 0, target = warm, said = 0;
  Conn *all = calloc(total, sizeof *all);
  int64_t end = now_ns() + PATIENCE_S * 1000000000LL;
  struct epoll_event on_input = {.events = EPOLLIN, .data.ptr = NULL}, ready[256];
  if (!all) die("memory");
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, 0, &on_input)) die("standard input must be a pipe");
  for (;;) {
    while (begun < target && begun - answered < OPENING) {
      Conn *c = &all[begun++];
      opened(c);
      if (!sent(c)) die("send");
    }
    if (answered == target && said < target) {
      said = target;
      puts(target == total ? "ready" : "warm");
      fflush(stdout);
    }
    if (said < target && now_ns() > end) {
      fprintf(stderr, "%d of %d connections were answered in %d s\n", answered, target, PATIENCE_S);
      return 1;
    }
    int n = epoll_wait(epoll, ready, 256, 1000);
    for (int i = 0; i < n; i++) {
      Conn *c = ready[i].data.ptr;
      if (!c) {
        char line[64];
        ssize_t got = read(0, line, sizeof line);
        if (got <= 0) return 0;
        target = total;
        continue;
      }
      if (ready[i].events & EPOLLOUT) sent(c);
      int r = received(c);
      if (r < 0 || (r > 0 && streams)) {
        fprintf(stderr, "%d connections were answered, then: %s\n", answered, r < 0 ? last_failure : "a stream came to its end");
        return 1;
      }
      if (!c->counted && (r > 0 || (streams && c->state != HEAD))) c->counted = 1, answered++;
      if (r > 0) fresh(c);
    }
  }
}

static void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof set, &set)) die("sched_setaffinity");
}

enum { TURNS = 8, MESSAGES = 2000, PASSES = 20000 };
static _Alignas(128) atomic_int ball;

static void *returns(void *core) {
  pin(*(int *)core);
  for (int i = 0; i < TURNS * PASSES; i++) {
    while (atomic_load(&ball) != 2 * i + 1) {}
    atomic_store(&ball, 2 * i + 2);
  }
  return NULL;
}

// Round trip of a cache line between this core and another, in ns.
static double distance(int other) {
  pthread_t thread;
  double least = 1e9;
  if (pthread_create(&thread, NULL, returns, &other)) die("pthread_create");
  for (int turn = 0; turn < TURNS; turn++) {
    int64_t began = now_ns();
    for (int i = turn * PASSES; i < (turn + 1) * PASSES; i++) {
      atomic_store(&ball, 2 * i + 1);
      while (atomic_load(&ball) != 2 * i + 2) {}
    }
    double each = (double)(now_ns() - began) / PASSES;
    if (each < least) least = each;
  }
  pthread_join(thread, NULL);
  return least;
}

static int probe(int core, int other) {
  int pair[2];
  char message[256] = {0};
  double least = 1e9;
  pin(core);
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) die("socketpair");
  for (int turn = 0; turn < TURNS; turn++) {
    int64_t began = now_ns();
    for (int i = 0; i < MESSAGES; i++)
      if (send(pair[0], message, sizeof message, 0) < 0 || recv(pair[1], message, sizeof message, 0) < 0) die("probe");
    double each = (now_ns() - began) / 1e3 / MESSAGES;
    if (each < least) least = each;
  }
  printf("%.4f %.1f\n", least, distance(other));
  return 0;
}

int main(int argc, char **argv) {
  epoll = epoll_create1(EPOLL_CLOEXEC);
  prctl(PR_SET_TIMERSLACK, 1);
  port = argc > 2 ? atoi(argv[2]) : 0;
  if (argc == 8 && !strcmp(argv[1], "rate")) {
    made_request(argv[3]);
    return rate(atoi(argv[4]), atof(argv[5]), atof(argv[6]), atof(argv[7]));
  }
  if (argc == 7 && !strcmp(argv[1], "hold")) {
    made_request(argv[3]);
    return hold(atoi(argv[4]), atoi(argv[5]), !strcmp(argv[6], "stream"));
  }
  if (argc == 4 && !strcmp(argv[1], "probe")) return probe(atoi(argv[2]), atoi(argv[3]));
  fprintf(stderr, "usage: %s rate PORT BODY CONNECTIONS RATE SECONDS WARMUP | hold PORT BODY WARM COUNT idle|stream | probe CORE OTHER\n", argv[0]);
  return 2;
}
