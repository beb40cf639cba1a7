/* What the files of emulator._shm_channel share; see _shm_channel.c. */
#ifndef ENTRESOL_SHM_CHANNEL_H
#define ENTRESOL_SHM_CHANNEL_H
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <sys/types.h>

/* 32-bit words of a control page. */
enum { CLOSED = 1, POSTED = 2, RECEIVED = 3, BUSY = 16, TARGET = 17, SENT = 32, ARMED = 48, POSTED_SIZES = 64 };
enum { RING_SLOTS = 1024 };
/* 64-bit words of it. */
enum { BASE = 9, LENGTH = 10, SLOTS = 640 };
#define IN_SOCKET 0xFFFFFFFFu
enum { RING_OFFSET_BYTES = 16384, RING_BYTES = 131072, LINE_BYTES = 64 };
enum { IDLE = 0, WRITING = 1, READING = 2, IN_KERNEL = 3 };
/* 64-bit words of a region table. */
enum { TABLE_SLOTS = 4096, WORDS = 8 };

#define TRANSFER_BYTES_MAX ((uint32_t)1 << 30)
enum { SETS = 64, WAYS = 4, REMOTE_WRITE = 2, REMOTE_READ = 4 };

/* The registered regions of one protection domain: a hash by lkey, searched place after place. */
typedef struct {
    uint64_t address, end;
    uint32_t lkey; /* 0: empty */
    int can_write;
} Row;

typedef struct {
    PyObject_HEAD
    Row *rows;
    uint32_t mask, used;
} Regions;

/* A region of the peer. `word` is what its slot of the peer's table must still say. Mapped here it lies at its address
 * plus `delta`; else it is reached by the kernel's copy. */
typedef struct {
    uint64_t word, low, end, delta;
    uint32_t rkey; /* 0: none */
    uint32_t slot, access;
    int is_mapped;
} Remote;

typedef struct {
    PyObject_HEAD
    Regions *regions;
    unsigned char *own, *theirs; /* control pages; NULL when detached */
    const unsigned char *table;
    int bell, pidfd;
    pid_t pid;
    Remote remotes[SETS][WAYS]; /* by rkey modulo SETS, the last learned first */
} Channel;

/* `RDMA_REQUEST` of doca_shims.api. */
typedef struct {
    uint64_t local, remote;
    uint32_t length, lkey, rkey, reserved;
} Request;

/* A request that may be carried out if the peer's table still says `word`. */
typedef struct {
    unsigned char *local, *far; /* `far`: NULL where it is not mapped here */
    uint64_t remote, word;
    uint32_t length, slot;
} Part;

static inline uint32_t *word_at(unsigned char *page, unsigned index)
{
    return (uint32_t *)(void *)page + index;
}

static inline uint64_t *quad_at(unsigned char *page, unsigned index)
{
    return (uint64_t *)(void *)page + index;
}

static inline uint32_t load(unsigned char *page, unsigned index)
{
    return __atomic_load_n(word_at(page, index), __ATOMIC_ACQUIRE);
}

static inline void store(unsigned char *page, unsigned index, uint32_t value)
{
    __atomic_store_n(word_at(page, index), value, __ATOMIC_RELEASE);
}

extern PyType_Spec shm_regions_spec;

/* Whether the range lies in the region of this key, which may be written where `writable`. */
int shm_is_local(const Regions *regions, uint32_t lkey, uint64_t address, uint64_t length, int writable);

/* Fill `part` from a request, if its local memory is good and its remote region is known and good. The caller has locked
 * the interpreter, which guards the tables. */
int shm_resolve(const Channel *channel, const Request *request, int write, Part *part);

/* Carry out parts in order, until one is not plain; how many were. Needs no lock of the interpreter. */
int shm_transfer(Channel *channel, const Part *parts, int count, int write);

#endif
