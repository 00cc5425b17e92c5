/* A disk that fails on command, under an unmodified process: preloaded, it makes writes and syncs of files below
 * PENSTOCK_FAILING_PREFIX return EIO while the file PENSTOCK_FAILING_FLAG exists.
 *
 * Only what changes a file fails. A disk that cannot be read either would do no more: the log directory is given
 * up at the first failure.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(int fd) {
    static const char *flag, *prefix;
    if (flag == NULL) {
        flag = getenv("PENSTOCK_FAILING_FLAG");
        prefix = getenv("PENSTOCK_FAILING_PREFIX");
        if (flag == NULL || prefix == NULL) {
            flag = "";
        }
    }
    if (*flag == '\0' || access(flag, F_OK) != 0) {
        return 0;
    }
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) {
        return 0;
    }
    path[size] = '\0';
    if (strncmp(path, prefix, strlen(prefix)) != 0) {
        return 0;
    }
    errno = EIO;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define FAILING(type, name, parameters, arguments)     \
    type name parameters {                             \
        static __typeof__(&name) real;                 \
        if (real == NULL) {                            \
            real = REAL(name);                         \
        }                                              \
        return fails(fd) ? -1 : real arguments;        \
    }

FAILING(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
FAILING(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
FAILING(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
FAILING(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
FAILING(ssize_t, pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
FAILING(ssize_t, pwritev64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
FAILING(ssize_t, pwritev2, (int fd, const struct iovec *parts, int count, off_t at, int flags),
        (fd, parts, count, at, flags))
FAILING(ssize_t, pwritev64v2, (int fd, const struct iovec *parts, int count, off64_t at, int flags),
        (fd, parts, count, at, flags))
FAILING(int, fsync, (int fd), (fd))
FAILING(int, fdatasync, (int fd), (fd))
FAILING(int, ftruncate, (int fd, off_t size), (fd, size))
FAILING(int, ftruncate64, (int fd, off64_t size), (fd, size))
