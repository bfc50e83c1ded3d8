/* mount.nfs4 for kernels without NFS: FUSE in front of libnfs, NFS version 3 over TCP.
 *
 * Stands in for nfs-common's program on test-bed hosts only, so that the share role's own units can
 * be exercised there. mount(8) calls it as: mount.nfs4 HOST:/PATH MOUNTPOINT [-fnsvrw] [-o OPTIONS]
 *
 * As with a kernel's mount with softerr, an operation that the server does not answer fails after
 * `timeo` and `retrans`, and works again once the server is back. Owners are those of the caller: every
 * request carries the uid and gid of who made it. Locks are local to the host. One connection under
 * one mutex, since libnfs contexts are not thread-safe.
 *
 * cc -O2 -Wall -Wextra -Werror mount_nfs.c -o mount.nfs4 $(pkg-config --cflags --libs fuse3 libnfs)
 * (nfs.py links libnfs and fuse3 statically, so that one program serves every Debian.)
 */
#define FUSE_USE_VERSION 31
#define _FILE_OFFSET_BITS 64
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <nfsc/libnfs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>

enum { EXIT_USAGE = 1, EXIT_MOUNT_FAILED = 32 }; /* as mount(8) documents them */

struct options {
    bool read_only;
    bool fake;
    int timeo;   /* tenths of a second before the first retry, as in nfs(5) */
    int retrans; /* retries */
};

static struct nfs_context *nfs;
static pthread_mutex_t nfs_mutex = PTHREAD_MUTEX_INITIALIZER;

/* What libnfs calls EINTR, and programs would try again for ever, is what softerr calls ETIMEDOUT.
 * Nothing else may follow a request that went half: the next one finds the connection closed. */
static long give_up(void) {
    shutdown(nfs_get_fd(nfs), SHUT_RDWR);
    return -ETIMEDOUT;
}

/* Evaluates a libnfs call alone and on behalf of whoever asked; libnfs returns 0 or -errno. */
#define ASK(call)                                                                                  \
    __extension__({                                                                                \
        pthread_mutex_lock(&nfs_mutex);                                                            \
        nfs_set_uid(nfs, (int)fuse_get_context()->uid);                                            \
        nfs_set_gid(nfs, (int)fuse_get_context()->gid);                                            \
        long answer_ = (call);                                                                     \
        if (answer_ == -EINTR)                                                                     \
            answer_ = give_up();                                                                   \
        pthread_mutex_unlock(&nfs_mutex);                                                          \
        (int)answer_;                                                                              \
    })

static struct nfsfh *handle_of(const struct fuse_file_info *info) {
    return (struct nfsfh *)(uintptr_t)info->fh;
}

static void *on_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    config->use_ino = 1;
    config->attr_timeout = 1;
    config->entry_timeout = 1;
    connection->max_write = 1 << 20;
    return NULL;
}

static int on_getattr(const char *path, struct stat *found, struct fuse_file_info *info) {
    (void)info;
    struct nfs_stat_64 from;
    int answer = ASK(nfs_lstat64(nfs, path, &from));
    if (answer != 0)
        return answer;
    *found = (struct stat){
        .st_ino = from.nfs_ino,
        .st_mode = from.nfs_mode,
        .st_nlink = from.nfs_nlink,
        .st_uid = from.nfs_uid,
        .st_gid = from.nfs_gid,
        .st_size = (off_t)from.nfs_size,
        .st_blksize = (blksize_t)from.nfs_blksize,
        .st_blocks = (blkcnt_t)((from.nfs_size + 511) / 512),
        .st_atim = {(time_t)from.nfs_atime, (long)from.nfs_atime_nsec},
        .st_mtim = {(time_t)from.nfs_mtime, (long)from.nfs_mtime_nsec},
        .st_ctim = {(time_t)from.nfs_ctime, (long)from.nfs_ctime_nsec},
    };
    return 0;
}

static int on_readdir(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset,
                      struct fuse_file_info *info, enum fuse_readdir_flags flags) {
    (void)offset, (void)info, (void)flags;
    struct nfsdir *folder;
    int answer = ASK(nfs_opendir(nfs, path, &folder)); /* reads all of it */
    if (answer != 0)
        return answer;
    for (struct nfsdirent *entry; (entry = nfs_readdir(nfs, folder)) != NULL;)
        fill(buffer, entry->name, NULL, 0, 0);
    ASK((nfs_closedir(nfs, folder), 0));
    return 0;
}

static int on_open(const char *path, struct fuse_file_info *info) {
    struct nfsfh *handle = NULL;
    int flags = info->flags & (O_ACCMODE | O_TRUNC | O_SYNC);
    int answer = ASK(nfs_open(nfs, path, flags, &handle));
    info->fh = (uintptr_t)handle;
    return answer;
}

static int on_create(const char *path, mode_t mode, struct fuse_file_info *info) {
    struct nfsfh *handle = NULL;
    int flags = O_CREAT | (info->flags & (O_ACCMODE | O_EXCL | O_TRUNC));
    int answer = ASK(nfs_open2(nfs, path, flags, (int)mode, &handle));
    info->fh = (uintptr_t)handle;
    return answer;
}

static int on_release(const char *path, struct fuse_file_info *info) {
    (void)path;
    return ASK(nfs_close(nfs, handle_of(info)));
}

static int on_read(const char *path, char *buffer, size_t size, off_t offset,
                   struct fuse_file_info *info) {
    (void)path;
    return ASK(nfs_pread(nfs, handle_of(info), (uint64_t)offset, size, buffer));
}

static int on_write(const char *path, const char *buffer, size_t size, off_t offset,
                    struct fuse_file_info *info) {
    (void)path;
    return ASK(nfs_pwrite(nfs, handle_of(info), (uint64_t)offset, size, (void *)buffer));
}

static int on_fsync(const char *path, int only_data, struct fuse_file_info *info) {
    (void)path, (void)only_data;
    return ASK(nfs_fsync(nfs, handle_of(info)));
}

static int on_truncate(const char *path, off_t size, struct fuse_file_info *info) {
    if (info != NULL)
        return ASK(nfs_ftruncate(nfs, handle_of(info), (uint64_t)size));
    return ASK(nfs_truncate(nfs, path, (uint64_t)size));
}

static int on_unlink(const char *path) { return ASK(nfs_unlink(nfs, path)); }

static int on_mkdir(const char *path, mode_t mode) { return ASK(nfs_mkdir2(nfs, path, (int)mode)); }

static int on_rmdir(const char *path) { return ASK(nfs_rmdir(nfs, path)); }

static int on_rename(const char *from, const char *to, unsigned int flags) {
    return flags != 0 ? -EINVAL : ASK(nfs_rename(nfs, from, to));
}

static int on_symlink(const char *target, const char *path) {
    return ASK(nfs_symlink(nfs, target, path));
}

static int on_link(const char *from, const char *to) { return ASK(nfs_link(nfs, from, to)); }

static int on_readlink(const char *path, char *buffer, size_t size) {
    int answer = ASK(nfs_readlink(nfs, path, buffer, (int)size));
    return answer < 0 ? answer : 0;
}

static int on_chmod(const char *path, mode_t mode, struct fuse_file_info *info) {
    (void)info;
    return ASK(nfs_chmod(nfs, path, (int)(mode & 07777)));
}

static int on_chown(const char *path, uid_t uid, gid_t gid, struct fuse_file_info *info) {
    (void)info;
    struct nfs_stat_64 now; /* -1 leaves a number as it is; libnfs wants both */
    int answer = ASK(nfs_lstat64(nfs, path, &now));
    if (answer != 0)
        return answer;
    int new_uid = uid == (uid_t)-1 ? (int)now.nfs_uid : (int)uid;
    int new_gid = gid == (gid_t)-1 ? (int)now.nfs_gid : (int)gid;
    return ASK(nfs_chown(nfs, path, new_uid, new_gid));
}

static int on_utimens(const char *path, const struct timespec times[2],
                      struct fuse_file_info *info) {
    (void)info;
    struct nfs_stat_64 now;
    int answer = ASK(nfs_lstat64(nfs, path, &now));
    if (answer != 0)
        return answer;
    struct timeval wanted[2] = {
        {(time_t)now.nfs_atime, (suseconds_t)(now.nfs_atime_nsec / 1000)},
        {(time_t)now.nfs_mtime, (suseconds_t)(now.nfs_mtime_nsec / 1000)},
    };
    for (int i = 0; i < 2; i++) {
        if (times[i].tv_nsec == UTIME_NOW)
            gettimeofday(&wanted[i], NULL);
        else if (times[i].tv_nsec != UTIME_OMIT)
            wanted[i] = (struct timeval){times[i].tv_sec, times[i].tv_nsec / 1000};
    }
    return ASK(nfs_utimes(nfs, path, wanted));
}

static int on_statfs(const char *path, struct statvfs *found) {
    return ASK(nfs_statvfs(nfs, path, found));
}

static const struct fuse_operations operations = {
    .init = on_init,       .getattr = on_getattr, .readdir = on_readdir,   .open = on_open,
    .create = on_create,   .release = on_release, .read = on_read,         .write = on_write,
    .fsync = on_fsync,     .truncate = on_truncate, .unlink = on_unlink,   .mkdir = on_mkdir,
    .rmdir = on_rmdir,     .rename = on_rename,   .symlink = on_symlink,   .link = on_link,
    .readlink = on_readlink, .chmod = on_chmod,   .chown = on_chown,       .utimens = on_utimens,
    .statfs = on_statfs,
};

/* Reads `-o a,b=1`; what only a kernel understands (softerr, nosuid, ...) is passed over. */
static void read_options(char *text, struct options *options) {
    for (char *rest = text, *word; (word = strsep(&rest, ",")) != NULL;) {
        if (strcmp(word, "ro") == 0)
            options->read_only = true;
        else if (strncmp(word, "timeo=", 6) == 0)
            options->timeo = atoi(word + 6);
        else if (strncmp(word, "retrans=", 8) == 0)
            options->retrans = atoi(word + 8);
    }
}

/* nfs(5): over TCP each retry waits `timeo` longer than the one before. In milliseconds. */
static int patience(const struct options *options) {
    int tries = options->retrans + 1;
    return options->timeo * 100 * tries * (tries + 1) / 2;
}

int main(int argc, char **argv) {
    struct options options = {.timeo = 600, .retrans = 2};
    if (argc < 3) {
        fprintf(stderr, "usage: %s HOST:/PATH MOUNTPOINT [-fnsvrw] [-o OPTIONS]\n", argv[0]);
        return EXIT_USAGE;
    }
    char *source = argv[1], *target = argv[2];
    for (int i = 3; i < argc; i++) {
        if (strcmp(argv[i], "-o") == 0 && i + 1 < argc)
            read_options(argv[++i], &options);
        else if (argv[i][0] == '-' && strchr(argv[i], 'r') != NULL)
            options.read_only = true;
        else if (argv[i][0] == '-' && strchr(argv[i], 'f') != NULL)
            options.fake = true;
    }
    char *host = strdup(source), *path = strstr(host, ":/");
    if (path == NULL) {
        fprintf(stderr, "%s: %s is not HOST:/PATH\n", argv[0], source);
        return EXIT_USAGE;
    }
    *path++ = '\0';
    if (options.fake)
        return 0;

    nfs = nfs_init_context();
    nfs_set_version(nfs, 3); /* over version 4 libnfs 4.0 loses chown */
    nfs_set_timeout(nfs, patience(&options));
    if (nfs_mount(nfs, host, path) != 0) {
        fprintf(stderr, "%s: %s: %s\n", argv[0], source, nfs_get_error(nfs));
        return EXIT_MOUNT_FAILED;
    }
    nfs_set_autoreconnect(nfs, -1); /* for as long as it is mounted */

    char fuse_options[1024];
    int length = snprintf(fuse_options, sizeof fuse_options,
                          "fsname=%s,subtype=nfs4,allow_other,default_permissions,nosuid,nodev%s",
                          source, options.read_only ? ",ro" : "");
    if (length >= (int)sizeof fuse_options)
        return EXIT_USAGE;
    char *fuse_arguments[] = {argv[0], target, "-o", fuse_options, NULL};
    return fuse_main(4, fuse_arguments, &operations, NULL) == 0 ? 0 : EXIT_MOUNT_FAILED;
}
