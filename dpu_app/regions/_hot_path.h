/* What the parts of _hot_path share: columns held by the buffer protocol, the key table, the frames.
 *
 * No global state but the types; everything is checked against the sizes of the buffers it lies in, and everything
 * that a peer sent is untrusted. Little-endian only (common/native.py). Callers hold the GIL throughout.
 */
#ifndef ENTRESOL_HOT_PATH_H
#define ENTRESOL_HOT_PATH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define BATCH_MAX 512 /* common/wire.py MAX_BATCH */
#define NO_SLOT (-1)
#define NO_FRAME (-1)

/* `count` items of `item_bytes` each, within `view`, which keeps them alive. */
struct column {
    Py_buffer view;
    Py_ssize_t count;
};

int column_open(struct column *column, PyObject *source, Py_ssize_t item_bytes, int writable, const char *name);
void column_close(struct column *column);

/* A new object of `type`, made whole by `initialize` or not at all. */
typedef int (*initializer)(PyObject *self, PyObject *arguments, PyObject *keywords);
PyObject *object_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords, initializer initialize);

/* ---- key_hash.py's buckets and the index's key columns ---- */

typedef struct {
    PyObject_HEAD
    struct column cells, tags, key_lo, key_hi, namespaces;
    uint64_t buckets, salt_lo, salt_hi, slots;
} KeyTable;

struct keys {
    uint64_t lo[BATCH_MAX], hi[BATCH_MAX];
    uint16_t namespace_id[BATCH_MAX];
};

/* slots[i] is that of key i, or NO_SLOT. Keys that the hash holds elsewhere (KeyHash._homeless) are not found. */
void keys_find(const KeyTable *table, const struct keys *keys, uint32_t count, int64_t *slots);

extern PyType_Spec key_table_spec;

/* ---- window.py's frames ---- */

enum { FRAME_DIRTY = 3, FRAME_CLEAN = 4, FRAME_DOOMED = 5 }; /* window.py FrameState */

typedef struct {
    PyObject_HEAD
    struct column references, states, block_states, links;
    uint32_t frames;
    uint32_t mask, used;
    uint8_t shift;
    uint32_t *keys; /* slot, or EMPTY */
    int32_t *values;
} Frames;

int32_t frames_get(const Frames *frames, uint32_t slot);
/* To the head of the order of clean frames, if it is one. */
void frames_touch(Frames *frames, uint32_t frame);

extern PyType_Spec frames_spec;

/* ---- requests ---- */

#define KEY_ENTRY_BYTES 24 /* common/wire.py */

enum { /* common/wire.py StatId */
    STAT_RETRIEVES = 24,
    STAT_RETRIEVE_BYTES = 25,
    STAT_RETRIEVE_STAGED = 26,
    STAT_RETRIEVE_MISSES = 28,
    STAT_LOOKUPS = 29,
    STAT_LOOKUP_HITS = 30,
    STATS = 31,
};

typedef struct {
    PyObject_HEAD
    KeyTable *keys;
    Frames *frames;
    PyObject *homeless; /* dict: keys that the table could not place */
    PyObject *on_hit;   /* called with each slot used, where the policy has no counters */
    PyObject *wall_ns;
    struct column length, checksum, expires_s, stats, hits, after_hit;
    uint64_t window_address, frame_bytes;
} HotPath;

/* Key and namespace of each entry (BLOCK_ENTRY and KEY_ENTRY begin alike). The number of entries whose handle the
 * session has not opened; they are listed in `denied`, and their keys mean nothing. */
uint32_t read_keys(const uint8_t *entries, Py_ssize_t entry_bytes, uint32_t count, const Py_buffer *handles,
                   struct keys *keys, uint32_t *denied);
/* The table of handles, an array of int64. -1: an error. */
int handles_open(PyObject *source, Py_buffer *handles);
/* `arguments` are those of HotPath.serve, whose first is the capsule. */
PyObject *batch_serve(HotPath *self, const Py_buffer *capsule, PyObject *const *arguments);

#endif
