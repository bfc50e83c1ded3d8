/* Lets reads at an offset fail as those of a broken disk do, or end their process.

   Preloaded (LD_PRELOAD). $READ_FAULTS names a folder: while it contains a file `EIO`, such a read
   fails with this error, and while it contains `SIGKILL`, it ends the process. */

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_ordered(const char *fault) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("READ_FAULTS"), fault);
    return access(path, F_OK) == 0;
}

ssize_t preadv2(int file, const struct iovec *parts, int count, off_t offset, int flags) {
    if (is_ordered("SIGKILL"))
        kill(getpid(), SIGKILL);
    if (is_ordered("EIO")) {
        errno = EIO;
        return -1;
    }
    return syscall(SYS_preadv2, file, parts, (long)count, (long)offset, 0L, (long)flags);
}

ssize_t preadv(int file, const struct iovec *parts, int count, off_t offset) {
    return preadv2(file, parts, count, offset, 0);
}

/* What Python calls depends on how it was compiled. */
ssize_t preadv64(int, const struct iovec *, int, off64_t) __attribute__((alias("preadv")));
ssize_t preadv64v2(int, const struct iovec *, int, off64_t, int) __attribute__((alias("preadv2")));
