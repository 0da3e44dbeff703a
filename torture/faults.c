/* Let the n-th call that changes something below a folder fail, and all after it or only that one;
   or kill the process at it. Loaded before libc (LD_PRELOAD), so that it sees the calls of every
   library in the process. faults_plan() is called from Python. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char under[PATH_MAX];
static long at, seen;
static int failure, once;

/* error 0 kills; at 0 only counts. */
void faults_plan(const char *folder, long n, int error, int only_once) {
    strncpy(under, folder, sizeof under - 1);
    at = n, failure = error, once = only_once, seen = 0;
}

long faults_seen(void) { return seen; }

static int below(int directory, const char *path) {
    char full[2 * PATH_MAX + 32] = "", link[64];
    if (!under[0]) return 0;
    if (path && path[0] == '/') {
        snprintf(full, sizeof full, "%s", path);
    } else {
        if (directory == AT_FDCWD) {
            if (!getcwd(full, PATH_MAX)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            if (readlink(link, full, PATH_MAX) < 0) return 0;
        }
        if (path) strcat(strcat(full, "/"), path);
    }
    return strncmp(full, under, strlen(under)) == 0;
}

/* Return whether this call fails; a full disk still deletes and renames. */
static int fails(int directory, const char *path, int needs_room) {
    int before = errno;
    if (!below(directory, path)) return errno = before, 0;
    long n = __sync_add_and_fetch(&seen, 1);
    errno = before;
    if (!at || n < at || (once && n > at)) return 0;
    if (!failure) kill(getpid(), SIGKILL);
    if (failure == ENOSPC && !needs_room) return 0;
    errno = failure;
    return 1;
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))

#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...) {                          \
        va_list rest;                                                     \
        va_start(rest, flags);                                            \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                     \
        if (WRITES(flags) && fails(AT_FDCWD, path, 1)) return -1;         \
        return REAL(name)(path, flags, mode);                             \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                      \
    int name(int directory, const char *path, int flags, ...) {           \
        va_list rest;                                                     \
        va_start(rest, flags);                                            \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                     \
        if (WRITES(flags) && fails(directory, path, 1)) return -1;        \
        return REAL(name)(directory, path, flags, mode);                  \
    }
OPENAT(openat)
OPENAT(openat64)

#define CALL(type, name, parameters, arguments, directory, path, needs_room) \
    type name parameters {                                                \
        if (fails(directory, path, needs_room)) return -1;                \
        return REAL(name) arguments;                                      \
    }
CALL(ssize_t, write, (int f, const void *b, size_t n), (f, b, n), f, NULL, 1)
CALL(ssize_t, pwrite64, (int f, const void *b, size_t n, off64_t o), (f, b, n, o), f, NULL, 1)
CALL(ssize_t, writev, (int f, const struct iovec *v, int n), (f, v, n), f, NULL, 1)
CALL(int, ftruncate64, (int f, off64_t n), (f, n), f, NULL, 1)
CALL(int, fsync, (int f), (f), f, NULL, 1)
CALL(int, mkdir, (const char *p, mode_t m), (p, m), AT_FDCWD, p, 1)
CALL(int, rename, (const char *p, const char *q), (p, q), AT_FDCWD, p, 0)
CALL(int, renameat, (int d, const char *p, int e, const char *q), (d, p, e, q), d, p, 0)
CALL(int, renameat2, (int d, const char *p, int e, const char *q, unsigned f), (d, p, e, q, f), d, p, 0)
CALL(int, unlink, (const char *p), (p), AT_FDCWD, p, 0)
CALL(int, unlinkat, (int d, const char *p, int f), (d, p, f), d, p, 0)
CALL(int, rmdir, (const char *p), (p), AT_FDCWD, p, 0)

/* Unlike the others it returns the error. */
int posix_fallocate64(int f, off64_t start, off64_t n) {
    return fails(f, NULL, 1) ? errno : REAL(posix_fallocate64)(f, start, n);
}
int posix_fallocate(int f, off_t start, off_t n) {
    return fails(f, NULL, 1) ? errno : REAL(posix_fallocate)(f, start, n);
}
