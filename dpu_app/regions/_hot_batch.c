/* The plain case of LOOKUP and RETRIEVE, from capsule to capsule: every block there, staged, and wanted in one piece, or
 * missing. Everything else is answered None before anything has been changed. Capsules: common/wire.py.
 */
#include "_hot_path.h"

#define HEADER_BYTES 40
#define MAGIC 0x4E45
#define VERSION 1
#define OP_RETRIEVE 2
#define OP_LOOKUP 3
#define FLAG_RESPONSE 1
#define FLAGS_ALL 15
#define WANT_CHECKSUM 2
#define BLOCK_ENTRY_BYTES 64
#define RESULT_BYTES 16
#define LOOKUP_RESULT_BYTES 8
#define REQUEST_BYTES 32 /* doca_shims/api.py RDMA_REQUEST */
#define STATUS_OK 0
#define STATUS_MISS 2
#define HITS_ONE_BY_ONE 16 /* catalogue.py FEW_USES */
#define NS_PER_S 1000000000

/* A request, checked as far as its header goes. */
struct request {
    const uint8_t *entries;
    uint8_t op;
    uint16_t count;
    uint64_t request_id;
    struct keys keys;
    int64_t slots[BATCH_MAX];
};

struct delivery {
    uint32_t slots[BATCH_MAX], frames[BATCH_MAX], counts[BATCH_MAX];
    uint32_t count, misses;
    uint64_t bytes;
};

static uint16_t load16(const uint8_t *from)
{
    uint16_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static uint32_t load32(const uint8_t *from)
{
    uint32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static uint64_t load64(const uint8_t *from)
{
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static void store32(uint8_t *to, uint32_t value)
{
    memcpy(to, &value, sizeof value);
}

static void store64(uint8_t *to, uint64_t value)
{
    memcpy(to, &value, sizeof value);
}

/* ---- finding ---- */

/* 1: a plain LOOKUP or RETRIEVE. 0: not one. */
static int read_header(const Py_buffer *capsule, struct request *r)
{
    const uint8_t *header = capsule->buf;
    if (capsule->len < HEADER_BYTES)
        return 0;
    r->op = header[3];
    uint16_t flags = load16(header + 4);
    uint16_t entry_bytes = r->op == OP_LOOKUP ? KEY_ENTRY_BYTES : BLOCK_ENTRY_BYTES;
    r->count = load16(header + 8);
    r->request_id = load64(header + 24);
    r->entries = header + HEADER_BYTES;
    return load16(header) == MAGIC && header[2] == VERSION && (r->op == OP_LOOKUP || r->op == OP_RETRIEVE) &&
           !(flags & ~FLAGS_ALL) && !(flags & FLAG_RESPONSE) && header[6] == STATUS_OK && header[7] == 0 &&
           r->count >= 1 && r->count <= BATCH_MAX && load16(header + 10) == entry_bytes && load32(header + 12) == 0 &&
           load32(header + 20) == 0 && capsule->len == HEADER_BYTES + (Py_ssize_t)r->count * entry_bytes;
}

uint32_t read_keys(const uint8_t *entries, Py_ssize_t entry_bytes, uint32_t count, const Py_buffer *handles,
                   struct keys *keys, uint32_t *denied)
{
    const int64_t *table = handles->buf;
    uint64_t known = (uint64_t)handles->len / sizeof *table;
    uint32_t refused = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *entry = entries + (Py_ssize_t)i * entry_bytes;
        uint32_t handle = load32(entry + 16);
        int64_t namespace_id = handle < known ? table[handle] : -1;
        keys->lo[i] = load64(entry);
        keys->hi[i] = load64(entry + 8);
        keys->namespace_id[i] = (uint16_t)namespace_id;
        if (namespace_id < 0 || namespace_id > UINT16_MAX)
            denied[refused++] = i;
    }
    return refused;
}

int handles_open(PyObject *source, Py_buffer *handles)
{
    if (PyObject_GetBuffer(source, handles, PyBUF_SIMPLE) < 0)
        return -1;
    if ((uintptr_t)handles->buf % sizeof(int64_t) == 0)
        return 0;
    PyBuffer_Release(handles);
    PyErr_SetString(PyExc_ValueError, "the table of handles is not aligned");
    return -1;
}

/* 1 where the block has expired, 0 where not, -1: an error. `now_s` is asked for once, and only if need be. */
static int expired(HotPath *self, uint64_t slot, uint64_t *now_s)
{
    uint32_t expires_s = ((const uint32_t *)self->expires_s.view.buf)[slot];
    if (expires_s == 0)
        return 0;
    if (*now_s == 0) {
        PyObject *now_ns = PyObject_CallNoArgs(self->wall_ns);
        if (now_ns == NULL)
            return -1;
        *now_s = PyLong_AsUnsignedLongLong(now_ns) / NS_PER_S;
        Py_DECREF(now_ns);
        if (PyErr_Occurred())
            return -1;
    }
    return expires_s <= *now_s;
}

/* Fill in `slots`. 1: plain so far. 0: it is not: denied, homeless or expired entries. -1: an error. */
static int find_all(HotPath *self, struct request *r, PyObject *handles)
{
    Py_buffer table;
    uint32_t denied[BATCH_MAX];
    if (handles_open(handles, &table) < 0)
        return -1;
    Py_ssize_t entry_bytes = r->op == OP_LOOKUP ? KEY_ENTRY_BYTES : BLOCK_ENTRY_BYTES;
    uint32_t refused = read_keys(r->entries, entry_bytes, r->count, &table, &r->keys, denied);
    PyBuffer_Release(&table);
    if (refused)
        return 0;
    keys_find(self->keys, &r->keys, r->count, r->slots);
    int homeless = PyDict_GET_SIZE(self->homeless) > 0;
    uint64_t now_s = 0;
    for (uint32_t i = 0; i < r->count; i++) {
        if (r->slots[i] == NO_SLOT) {
            if (homeless)
                return 0;
            continue;
        }
        int gone = expired(self, (uint64_t)r->slots[i], &now_s);
        if (gone)
            return gone < 0 ? -1 : 0;
    }
    return 1;
}

/* ---- answering ---- */

static PyObject *response_new(const struct request *r, uint16_t entry_bytes, uint64_t aux, uint8_t **entries)
{
    PyObject *response = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + (Py_ssize_t)r->count * entry_bytes);
    if (response == NULL)
        return NULL;
    uint8_t *header = (uint8_t *)PyBytes_AS_STRING(response);
    const uint16_t magic = MAGIC, flags = FLAG_RESPONSE;
    memset(header, 0, (size_t)PyBytes_GET_SIZE(response));
    memcpy(header, &magic, sizeof magic);
    header[2] = VERSION;
    header[3] = r->op;
    memcpy(header + 4, &flags, sizeof flags);
    memcpy(header + 8, &r->count, sizeof r->count);
    memcpy(header + 10, &entry_bytes, sizeof entry_bytes);
    store64(header + 24, r->request_id);
    store64(header + 32, aux);
    *entries = header + HEADER_BYTES;
    return response;
}

static void count(HotPath *self, int stat, uint64_t amount)
{
    ((uint64_t *)self->stats.view.buf)[stat] += amount;
}

static PyObject *lookup(HotPath *self, const struct request *r)
{
    uint32_t prefix = 0, present = 0;
    while (prefix < r->count && r->slots[prefix] != NO_SLOT)
        prefix++;
    uint8_t *result;
    PyObject *response = response_new(r, LOOKUP_RESULT_BYTES, prefix, &result);
    if (response == NULL)
        return NULL;
    const uint8_t *states = self->frames->block_states.view.buf;
    for (uint32_t i = 0; i < r->count; i++, result += LOOKUP_RESULT_BYTES) {
        if (r->slots[i] == NO_SLOT) {
            result[0] = STATUS_MISS;
            continue;
        }
        int32_t frame = frames_get(self->frames, (uint32_t)r->slots[i]);
        result[0] = STATUS_OK;
        result[1] = states[frame == NO_FRAME ? self->frames->frames : (uint32_t)frame];
        store32(result + 4, ((const uint32_t *)self->length.view.buf)[r->slots[i]]);
        present++;
    }
    count(self, STAT_LOOKUPS, r->count);
    count(self, STAT_LOOKUP_HITS, present);
    PyObject *answer = PyTuple_Pack(4, response, Py_None, Py_None, Py_None);
    Py_DECREF(response);
    return answer;
}

/* Where each block lies and how much of it goes where. 1: plain. 0: it is not. */
static int place_all(HotPath *self, const struct request *r, uint64_t room, uint64_t room_moved, struct delivery *d)
{
    const Frames *frames = self->frames;
    const uint32_t *references = frames->references.view.buf;
    const uint8_t *states = frames->states.view.buf;
    uint64_t end = 0;
    d->count = d->misses = 0;
    d->bytes = 0;
    for (uint32_t i = 0; i < r->count; i++) {
        const uint8_t *entry = r->entries + (size_t)i * BLOCK_ENTRY_BYTES;
        if (r->slots[i] == NO_SLOT) {
            d->misses++;
            continue;
        }
        uint32_t slot = (uint32_t)r->slots[i];
        int32_t frame = frames_get(frames, slot);
        if (frame == NO_FRAME || states[frame] < FRAME_DIRTY || states[frame] > FRAME_CLEAN)
            return 0;
        uint64_t length = ((const uint32_t *)self->length.view.buf)[slot];
        uint64_t wanted = load32(entry + 20), offset = load32(entry + 24), address = load64(entry + 32);
        if (offset >= length)
            return 0;
        uint64_t size = wanted ? wanted : length - offset;
        if (offset + size > length || length > self->frame_bytes || load16(entry + 30) != 1 ||
            (size != length && load16(entry + 28) & WANT_CHECKSUM))
            return 0;
        if (address < end || address + size < address)
            return 0;
        end = address + size;
        if (references[frame] > UINT32_MAX - BATCH_MAX)
            return 0;
        d->slots[d->count] = slot;
        d->frames[d->count] = (uint32_t)frame;
        d->counts[d->count++] = (uint32_t)size;
        d->bytes += size;
    }
    return d->count <= room && d->bytes <= room_moved;
}

static int count_hits(HotPath *self, const struct delivery *d)
{
    if (self->on_hit != NULL) {
        for (uint32_t i = 0; i < d->count; i++) {
            PyObject *slot = PyLong_FromUnsignedLong(d->slots[i]);
            PyObject *nothing = slot == NULL ? NULL : PyObject_CallOneArg(self->on_hit, slot);
            Py_XDECREF(slot);
            if (nothing == NULL)
                return -1;
            Py_DECREF(nothing);
        }
        return 0;
    }
    uint8_t *hits = self->hits.view.buf;
    const uint8_t *after = self->after_hit.view.buf;
    uint8_t states[BATCH_MAX];
    if (d->count <= HITS_ONE_BY_ONE) {
        for (uint32_t i = 0; i < d->count; i++)
            hits[d->slots[i]] = after[hits[d->slots[i]]];
        return 0;
    }
    for (uint32_t i = 0; i < d->count; i++) /* a slot named twice counts once, as in numpy */
        states[i] = after[hits[d->slots[i]]];
    for (uint32_t i = 0; i < d->count; i++)
        hits[d->slots[i]] = states[i];
    return 0;
}

static void fill_results(const HotPath *self, const struct request *r, const struct delivery *d, uint8_t *result)
{
    const uint32_t *lengths = self->length.view.buf;
    const uint64_t *checksums = self->checksum.view.buf;
    const uint8_t *states = self->frames->block_states.view.buf;
    uint32_t at = 0;
    for (uint32_t i = 0; i < r->count; i++, result += RESULT_BYTES) {
        if (r->slots[i] == NO_SLOT) {
            result[0] = STATUS_MISS;
            continue;
        }
        uint32_t slot = d->slots[at];
        result[0] = STATUS_OK;
        result[1] = states[d->frames[at]];
        store32(result + 4, d->counts[at]);
        if (d->counts[at] == lengths[slot])
            store64(result + 8, checksums[slot]);
        at++;
    }
}

static void fill_requests(const HotPath *self, const struct request *r, const struct delivery *d, uint32_t lkey,
                          uint8_t *to)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < r->count; i++) {
        const uint8_t *entry = r->entries + (size_t)i * BLOCK_ENTRY_BYTES;
        if (r->slots[i] == NO_SLOT)
            continue;
        store64(to, self->window_address + d->frames[at] * self->frame_bytes + load32(entry + 24));
        store64(to + 8, load64(entry + 32));
        store32(to + 16, d->counts[at]);
        store32(to + 20, lkey);
        store32(to + 24, load32(entry + 40));
        store32(to + 28, 0);
        to += REQUEST_BYTES;
        at++;
    }
}

static PyObject *retrieve(HotPath *self, const struct request *r, uint32_t lkey, uint64_t room, uint64_t room_moved,
                          int counting)
{
    struct delivery d;
    uint8_t *results;
    if (!place_all(self, r, room, room_moved, &d))
        Py_RETURN_NONE;
    if (counting && count_hits(self, &d) < 0)
        return NULL;
    PyObject *response = response_new(r, RESULT_BYTES, 0, &results);
    if (response == NULL)
        return NULL;
    fill_results(self, r, &d, results);
    PyObject *answer = NULL;
    PyObject *requests = d.count ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)d.count * REQUEST_BYTES) : NULL;
    PyObject *held = d.count ? PyBytes_FromStringAndSize((const char *)d.frames, (Py_ssize_t)d.count * 4) : NULL;
    PyObject *moved = d.count ? PyLong_FromUnsignedLongLong(d.bytes) : NULL;
    if (!d.count)
        answer = PyTuple_Pack(4, response, Py_None, Py_None, Py_None);
    else if (requests != NULL && held != NULL && moved != NULL)
        answer = PyTuple_Pack(4, response, requests, held, moved);
    if (answer != NULL) {
        uint32_t *references = self->frames->references.view.buf;
        if (d.count)
            fill_requests(self, r, &d, lkey, (uint8_t *)PyBytes_AS_STRING(requests));
        for (uint32_t i = 0; i < d.count; i++) {
            references[d.frames[i]]++;
            frames_touch(self->frames, d.frames[i]);
        }
        count(self, STAT_RETRIEVES, r->count);
        count(self, STAT_RETRIEVE_STAGED, d.count);
        count(self, STAT_RETRIEVE_MISSES, d.misses);
        count(self, STAT_RETRIEVE_BYTES, d.bytes);
    }
    Py_DECREF(response);
    Py_XDECREF(requests);
    Py_XDECREF(held);
    Py_XDECREF(moved);
    return answer;
}

PyObject *batch_serve(HotPath *self, const Py_buffer *capsule, PyObject *const *arguments)
{
    struct request r;
    unsigned long lkey = PyLong_AsUnsignedLong(arguments[3]);
    long room = PyLong_AsLong(arguments[4]);
    long room_moved = PyLong_AsLong(arguments[6]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyDict_Check(arguments[2])) {
        PyErr_SetString(PyExc_TypeError, "the open requests are a dict");
        return NULL;
    }
    if (lkey > UINT32_MAX || room < 0 || room_moved < 0 || !read_header(capsule, &r))
        Py_RETURN_NONE;
    if (PyDict_GET_SIZE(arguments[2])) {
        PyObject *id = PyLong_FromUnsignedLongLong(r.request_id);
        int open = id == NULL ? -1 : PyDict_Contains(arguments[2], id);
        Py_XDECREF(id);
        if (open < 0)
            return NULL;
        if (open)
            Py_RETURN_NONE;
    }
    int plain = find_all(self, &r, arguments[1]);
    if (plain < 0)
        return NULL;
    if (!plain)
        Py_RETURN_NONE;
    if (r.op == OP_LOOKUP)
        return lookup(self, &r);
    return retrieve(self, &r, (uint32_t)lkey, (uint64_t)room, (uint64_t)room_moved, arguments[5] == Py_True);
}

