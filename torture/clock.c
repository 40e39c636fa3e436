/*
 * A library that changes the time of day of the server or daemon that preloads it: it adds the number in a file.
 *
 * The file has one number of microseconds, in eight bytes and in the machine's byte order. The file is mapped into
 * memory, so a process sees a new number at its next call. Monotonic clocks do not change: stepping a real clock does
 * not change them either. libfaketime does not work in Redis, because libfaketime allocates memory while jemalloc
 * starts. This library allocates no memory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("TALLYD_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        offset = mapped;
}

static void add(struct timespec *at, int64_t micros)
{
    int64_t nanos = at->tv_nsec + micros % 1000000 * 1000;
    at->tv_sec += micros / 1000000 + (nanos < 0 ? -1 : nanos / 1000000000);
    at->tv_nsec = nanos < 0 ? nanos + 1000000000 : nanos % 1000000000;
}

int clock_gettime(clockid_t clock, struct timespec *at)
{
    /* The kernel returns errors as -1 with errno. */
    int result = (int)syscall(SYS_clock_gettime, clock, at);
    if (result == 0 && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        add(at, *offset);
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}

/* A wait ends at a time that the kernel compares with its own clock, so the offset is subtracted. A time before 2001 is
 * from a clock that began at the machine's start, and is not changed. */
int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec at = *until;
    if (offset && at.tv_sec > 1000000000)
        add(&at, -*offset);
    return real(cond, mutex, &at);
}
