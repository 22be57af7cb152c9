/* Preloaded into a server: keeps what its disk would hold if the power failed.

   After each fsync or fdatasync below SYNCED_ROOT, the file as it is then is copied to
   SYNCED_COPIES/INODE, and SYNCED_COPIES/log gets one line: "F INODE PATH" for a file, which is
   durable under the name that it has, or "D PATH" and one "E INODE PATH" for each entry of a
   folder. What was only written, renamed or removed leaves no trace. */

#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void append(const char *text, size_t num_bytes) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/log", getenv("SYNCED_COPIES"));
    int log = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (log < 0 || write(log, text, num_bytes) != (ssize_t)num_bytes) abort();
    close(log);
}

static void copy_file(const char *source, unsigned long inode) {
    char buffer[1 << 14], draft[PATH_MAX], copy[PATH_MAX];
    snprintf(copy, sizeof copy, "%s/%lu", getenv("SYNCED_COPIES"), inode);
    snprintf(draft, sizeof draft, "%s/%lu.%d", getenv("SYNCED_COPIES"), inode, gettid());
    int input = open(source, O_RDONLY), output = open(draft, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (input < 0 || output < 0) abort();
    for (ssize_t num_read; (num_read = read(input, buffer, sizeof buffer)) > 0;)
        if (write(output, buffer, num_read) != num_read) abort();
    close(input);
    close(output);
    if (rename(draft, copy)) abort();
}

static void note_folder(const char *path) {
    char *text = NULL;
    size_t num_bytes = 0;
    FILE *out = open_memstream(&text, &num_bytes);
    DIR *folder = opendir(path);
    if (!folder) abort();
    fprintf(out, "D %s\n", path);
    for (struct dirent *entry; (entry = readdir(folder));)
        if (entry->d_type == DT_REG)
            fprintf(out, "E %lu %s/%s\n", (unsigned long)entry->d_ino, path, entry->d_name);
    closedir(folder);
    fclose(out);
    append(text, num_bytes);
    free(text);
}

static void note(int descriptor) {
    char link[64], path[PATH_MAX], line[PATH_MAX + 64];
    const char *root = getenv("SYNCED_ROOT");
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    struct stat found;
    if (!root || length < 0 || fstat(descriptor, &found)) return;
    path[length] = 0;
    if (strncmp(path, root, strlen(root))) return;
    if (S_ISDIR(found.st_mode)) note_folder(path);
    if (!S_ISREG(found.st_mode) || !found.st_nlink) return;
    copy_file(link, found.st_ino);
    append(line, snprintf(line, sizeof line, "F %lu %s\n", (unsigned long)found.st_ino, path));
}

int fsync(int descriptor) {
    long status = syscall(SYS_fsync, descriptor);
    if (!status) note(descriptor);
    return (int)status;
}

int fdatasync(int descriptor) {
    long status = syscall(SYS_fdatasync, descriptor);
    if (!status) note(descriptor);
    return (int)status;
}
