/* A slow disk: delays fsync and fdatasync by as many milliseconds as the file named by SLOW_SYNC_FILE says. Loaded by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static void delay(void) {
    const char *path = getenv("SLOW_SYNC_FILE");
    char text[16] = {0};
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    if (read(file, text, sizeof text - 1) > 0) usleep((useconds_t)atoi(text) * 1000);
    close(file);
}

int fsync(int file) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    delay();
    return real(file);
}

int fdatasync(int file) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    delay();
    return real(file);
}
