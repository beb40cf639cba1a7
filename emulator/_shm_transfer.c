/* READ and WRITE: the initiator's side of the scheme of fabric_shm_pages.py; see _shm_channel.c. */
#include "_shm_channel.h"

#include <poll.h>
#include <string.h>
#include <sys/uio.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* From here on stores go past the cache: no line is read or taken from the other core's cache to be overwritten. With
 * another core reading the result this is 1.0 (4 KiB) to 1.5 times as fast as memcpy, and 4 to 5 times where memcpy is
 * glibc's `rep movsb` on a Zen core and the two addresses are close modulo the page (glibc bug 30994). */
#define STREAM_BYTES_MIN 4096

static void copy(unsigned char *to, const unsigned char *from, size_t length)
{
#if defined(__x86_64__)
    if (length >= STREAM_BYTES_MIN) {
        size_t head = -(uintptr_t)to & (LINE_BYTES - 1);
        memcpy(to, from, head);
        to += head, from += head, length -= head;
        for (; length >= LINE_BYTES; to += LINE_BYTES, from += LINE_BYTES, length -= LINE_BYTES) {
            _mm_prefetch((const char *)from + 1024, _MM_HINT_NTA);
            __m128i a = _mm_loadu_si128((const __m128i *)(const void *)from);
            __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(from + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(from + 32));
            __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(from + 48));
            _mm_stream_si128((__m128i *)(void *)to, a);
            _mm_stream_si128((__m128i *)(void *)(to + 16), b);
            _mm_stream_si128((__m128i *)(void *)(to + 32), c);
            _mm_stream_si128((__m128i *)(void *)(to + 48), d);
        }
        memcpy(to, from, length);
        _mm_sfence(); /* such stores are not ordered before the one that says IDLE */
        return;
    }
#endif
    memmove(to, from, length);
}

static int still_valid(const Channel *self, const Part *part)
{
    const uint64_t *words = (const uint64_t *)(const void *)self->table;
    return !load(self->theirs, CLOSED) &&
           __atomic_load_n(&words[WORDS + part->slot], __ATOMIC_ACQUIRE) == part->word;
}

/* process_vm_writev or readv. The remote iovec is the one in the peer's control page, BASE and LENGTH, which its owner
 * empties to take the memory back. Whether all was copied; what went wrong is for the Python code to find out. */
static int copy_in_kernel(Channel *self, const Part *part, int write)
{
    struct pollfd exit = {self->pidfd, POLLIN, 0};
    struct iovec local = {part->local, part->length};
    const struct iovec *remote = (const struct iovec *)(void *)quad_at(self->theirs, BASE);
    if (poll(&exit, 1, 0) != 0)
        return 0; /* its process id may be another's by now */
    ssize_t moved = write ? process_vm_writev(self->pid, &local, 1, remote, 1, 0)
                          : process_vm_readv(self->pid, &local, 1, remote, 1, 0);
    return moved == (ssize_t)part->length;
}

/* The initiator's side of the scheme. 0: the region or the connection is not what it was. */
static int transfer_part(Channel *self, const Part *part, int write)
{
    unsigned char *theirs = self->theirs;
    __atomic_store_n(word_at(theirs, TARGET), (uint32_t)part->word, __ATOMIC_RELAXED);
    __atomic_store_n(quad_at(theirs, BASE), part->remote, __ATOMIC_RELAXED);
    __atomic_store_n(quad_at(theirs, LENGTH), part->length, __ATOMIC_RELAXED);
    store(theirs, BUSY, part->far == NULL ? IN_KERNEL : write ? WRITING : READING);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    int valid = still_valid(self, part);
    if (valid && part->far == NULL)
        valid = copy_in_kernel(self, part, write);
    else if (valid && write)
        copy(part->far, part->local, part->length);
    else if (valid)
        copy(part->local, part->far, part->length);
    store(theirs, BUSY, IDLE);
    if (valid && !write) {
        /* What was read after a revocation may be anything. */
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        valid = still_valid(self, part);
    }
    return valid;
}

static const Remote *find(const Channel *self, uint32_t rkey)
{
    const Remote *remotes = self->remotes[rkey % SETS];
    for (int way = 0; rkey != 0 && way < WAYS; way++)
        if (remotes[way].rkey == rkey)
            return &remotes[way];
    return NULL;
}

int shm_resolve(const Channel *self, const Request *request, int write, Part *part)
{
    const Remote *remote = find(self, request->rkey);
    uint64_t length = request->length;
    if (!shm_is_local(self->regions, request->lkey, request->local, length, !write))
        return 0;
    if (length == 0) {
        part->length = 0;
        return 1;
    }
    if (remote == NULL || length > TRANSFER_BYTES_MAX || !(remote->access & (write ? REMOTE_WRITE : REMOTE_READ)) ||
        request->remote < remote->low || request->remote > remote->end || length > remote->end - request->remote)
        return 0;
    part->local = (unsigned char *)(uintptr_t)request->local;
    part->far = remote->is_mapped ? (unsigned char *)(uintptr_t)(request->remote + remote->delta) : NULL;
    part->remote = request->remote;
    part->word = remote->word;
    part->length = request->length;
    part->slot = remote->slot;
    return 1;
}

int shm_transfer(Channel *self, const Part *parts, int count, int write)
{
    int done = 0;
    while (done < count && (parts[done].length == 0 || transfer_part(self, &parts[done], write)))
        done++;
    return done;
}
