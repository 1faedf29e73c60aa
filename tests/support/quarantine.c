/* A malloc that finds writes into freed memory and past the end of a block, at nearly the speed of glibc's.

   LD_PRELOAD=quarantine.so python -m pytest ...

   A freed block is filled with 0xDD and kept, the oldest of them up to QUARANTINE_MB megabytes (256). When it leaves, a byte that
   has changed was written after the free. Behind each block there are bytes of 0xCB; one that has changed was written past the end.
   Whatever reads a freed block reads 0xDD: numbers near -1.4e18, which no test takes for right. glibc's own checks see less:
   a write after free only where it hits a list of theirs.

   What is found is appended to QUARANTINE_LOG (stderr by default): the block, its bytes, the test, the caller that made it, the
   one that freed it, and the stack that found it. `quarantine_check()` looks at all blocks that are held; the ranks of ranks.py
   call it after each function, so that the report names the function that wrote. QUARANTINE_TRACES=1 keeps whole stacks of makers
   and freers: slow. Only processes whose name begins with "python" are checked. */
#define _GNU_SOURCE
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t), *__libc_memalign(size_t, size_t), *__libc_calloc(size_t, size_t);
extern void __libc_free(void *);

#define DEPTH 14
#define BEHIND 64 /* bytes checked behind each block: a vector register */
#define FREED 0xDD
#define UNTOUCHED 0xCB
#define LARGEST (1u << 20) /* larger blocks go back to the system at once, where a stale write ends the process */
#define SLOTS (1u << 20)
enum { IN_USE = 0x5AFE5AFE, IN_QUARANTINE = 0xDEADDEAD };

typedef struct __attribute__((aligned(16))) {
  void *raw; /* what glibc gave */
  size_t size;
  int maker, freer, num_made, num_freed; /* threads, and lengths of their stacks */
  void *made[DEPTH], *freed[DEPTH];
  uint64_t state;
} Block; /* stands before the caller's bytes, whose alignment it keeps */
_Static_assert(sizeof(Block) % 16 == 0, "malloc aligns to 16 bytes");

static size_t most = 256u << 20, held;
static Block **ring;
static unsigned newest, oldest;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int checks, traces;
static __thread int inside __attribute__((tls_model("initial-exec"))); /* what is allocated by this file's own calls */
static __thread int thread __attribute__((tls_model("initial-exec"))); /* its number; a system call for each block takes too long */

static int this_thread(void) { return thread ? thread : (thread = syscall(SYS_gettid)); }

static void report(const char *fault, Block *block, size_t at) {
  inside++;
  const char *path = getenv("QUARANTINE_LOG"), *test = getenv("PYTEST_CURRENT_TEST");
  int out = path ? open(path, O_CREAT | O_WRONLY | O_APPEND, 0644) : 2;
  if (path) flock(out, LOCK_EX); /* all processes and threads write to one file */
  unsigned char *bytes = (unsigned char *)(block + 1);
  char text[1024];
  int n = snprintf(text, sizeof text,
                   "\n== quarantine: %s. Process %d, test %s: a block of %zu bytes, made by thread %d, freed by %d; byte %zu:\n  ", fault,
                   getpid(), test ? test : "-", block->size, block->maker, block->freer, at);
  for (size_t i = at & ~15ul; i < (at & ~15ul) + 48 && i < block->size + BEHIND; i++)
    n += snprintf(text + n, sizeof text - n, "%02x ", bytes[i]);
  void *found[30];
  dprintf(out, "%s\nmade by\n", text), backtrace_symbols_fd(block->made, block->num_made, out);
  dprintf(out, "freed by\n"), backtrace_symbols_fd(block->freed, block->num_freed, out);
  dprintf(out, "found by\n"), backtrace_symbols_fd(found, backtrace(found, 30), out);
  if (path) flock(out, LOCK_UN), close(out); /* unlocked by name: a fork may hold the file open */
  inside--;
}

static int stack(void **into, void *caller) {
  if (!traces) return into[0] = caller, 1;
  inside++;
  int depth = backtrace(into, DEPTH);
  inside--;
  return depth;
}

static void lock_for_fork(void) { pthread_mutex_lock(&lock); }
static void unlock_after_fork(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void start(void) {
  char name[32] = {0};
  int file = open("/proc/self/comm", O_RDONLY);
  if (file < 0 || read(file, name, 31) < 0) return;
  close(file);
  if (strncmp(name, "python", 6)) return;
  inside++;
  void *first[2];
  backtrace(first, 2); /* loads what it needs */
  if (getenv("QUARANTINE_TRACES")) traces = atoi(getenv("QUARANTINE_TRACES"));
  if (getenv("QUARANTINE_MB")) most = (size_t)atoi(getenv("QUARANTINE_MB")) << 20;
  ring = __libc_calloc(SLOTS, sizeof *ring);
  pthread_atfork(lock_for_fork, unlock_after_fork, unlock_after_fork);
  checks = 1;
  inside--;
}

static void check_behind(Block *block, const char *fault) {
  unsigned char *bytes = (unsigned char *)(block + 1);
  for (size_t i = block->size; i < block->size + BEHIND; i++)
    if (bytes[i] != UNTOUCHED) return report(fault, block, i);
}

static void check_freed(Block *block) {
  unsigned char *bytes = (unsigned char *)(block + 1);
  if (block->state != IN_QUARANTINE) return report("written before the start of a freed block", block, 0);
  size_t i = 0;
  for (; i + 8 <= block->size; i += 8)
    if (*(uint64_t *)(bytes + i) != 0xDDDDDDDDDDDDDDDDull) break;
  for (; i < block->size; i++)
    if (bytes[i] != FREED) return report("written after it was freed", block, i);
  check_behind(block, "written past its end after it was freed");
}

static void *make(size_t align, size_t size, void *caller) {
  if (size > 1ul << 46) return errno = ENOMEM, NULL;
  size_t front = sizeof(Block);
  if (align > 16) front = (front + align - 1) / align * align;
  char *raw = align > 16 ? __libc_memalign(align, front + size + BEHIND) : __libc_malloc(front + size + BEHIND);
  if (!raw) return NULL;
  Block *block = (Block *)(raw + front) - 1;
  block->raw = raw, block->size = size, block->state = IN_USE;
  block->maker = block->freer = block->num_made = block->num_freed = 0;
  if (checks && !inside) block->maker = this_thread(), block->num_made = stack(block->made, caller);
  memset((char *)(block + 1) + size, UNTOUCHED, BEHIND);
  return block + 1;
}

static void let_go(Block *block) {
  block->state = 0;
  __libc_free(block->raw);
}

void free(void *bytes) {
  if (!bytes) return;
  int error = errno;
  Block *block = (Block *)bytes - 1;
  if (block->state == IN_QUARANTINE) return report("freed twice", block, 0);
  if (block->state != IN_USE) return __libc_free(bytes); /* the loader's, from before */
  if (checks) check_behind(block, "written past its end");
  if (!checks || inside || block->size > LARGEST) return let_go(block), (void)(errno = error);
  block->freer = this_thread(), block->num_freed = stack(block->freed, __builtin_return_address(0));
  block->state = IN_QUARANTINE;
  memset(bytes, FREED, block->size);
  Block *gone[64];
  int num_gone = 0;
  pthread_mutex_lock(&lock);
  ring[newest++ % SLOTS] = block, held += block->size + sizeof(Block);
  while ((held > most || newest - oldest >= SLOTS) && num_gone < 64) {
    gone[num_gone] = ring[oldest++ % SLOTS];
    held -= gone[num_gone++]->size + sizeof(Block);
  }
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < num_gone; i++) check_freed(gone[i]), let_go(gone[i]);
  errno = error;
}

#define MAKE(align, size) make(align, size, __builtin_return_address(0))
void *malloc(size_t size) { return MAKE(16, size); }
void *memalign(size_t align, size_t size) { return MAKE(align, size); }
void *aligned_alloc(size_t align, size_t size) { return MAKE(align, size); }
void *valloc(size_t size) { return MAKE(4096, size); }
int posix_memalign(void **out, size_t align, size_t size) { return (*out = MAKE(align, size)) ? 0 : ENOMEM; }
size_t malloc_usable_size(void *bytes) { return bytes ? ((Block *)bytes - 1)->size : 0; }
void *calloc(size_t num, size_t each) {
  size_t size;
  if (__builtin_mul_overflow(num, each, &size)) return errno = ENOMEM, NULL;
  void *bytes = MAKE(16, size);
  return bytes ? memset(bytes, 0, size) : NULL;
}
void *realloc(void *bytes, size_t size) {
  if (!bytes) return MAKE(16, size);
  if (!size) return free(bytes), NULL;
  void *moved = MAKE(16, size);
  size_t before = malloc_usable_size(bytes);
  if (moved) memcpy(moved, bytes, before < size ? before : size), free(bytes);
  return moved;
}

__attribute__((destructor)) static void end(void) { /* what has not left yet; other threads may go on meanwhile */
  if (!checks) return;
  inside++;
  pthread_mutex_lock(&lock);
  while (oldest != newest) check_freed(ring[oldest++ % SLOTS]);
  held = 0; /* what other destructors free now may not take more out of the ring than is in it */
  pthread_mutex_unlock(&lock);
}

void quarantine_check(void) {
  if (!checks) return;
  inside++;
  pthread_mutex_lock(&lock);
  for (unsigned i = oldest; i != newest; i++) check_freed(ring[i % SLOTS]);
  pthread_mutex_unlock(&lock);
  inside--;
}
