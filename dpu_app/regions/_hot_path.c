/* The plain case of LOOKUP and RETRIEVE, from capsule to capsule: every block present, staged, and wanted in one piece.
 *
 * Optional: dpu_app/regions/hot_path.py uses it where it was built. Whatever is not plain (an entry denied, a cold or
 * expired block, a scatter list, a range that does not fit, destinations that descend, a capsule that is malformed, no
 * room in the send queue) is answered None before anything has been changed, and the engine's general way, in Python,
 * decides; both are held to the same answers by the same tests. Capsules: common/wire.py.
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
#define KEY_ENTRY_BYTES 24
#define RESULT_BYTES 16
#define LOOKUP_RESULT_BYTES 8
#define REQUEST_BYTES 32 /* doca_shims/api.py RDMA_REQUEST */
#define STATUS_OK 0
#define STATUS_MISS 2
#define HITS_ONE_BY_ONE 16 /* catalogue.py FEW_USES */
#define NS_PER_S 1000000000

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

/* ---- columns and objects ---- */

int column_open(struct column *column, PyObject *source, Py_ssize_t item_bytes, int writable, const char *name)
{
    if (PyObject_GetBuffer(source, &column->view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return -1;
    column->count = column->view.len / item_bytes;
    if ((uintptr_t)column->view.buf % (uintptr_t)item_bytes || column->view.len % item_bytes) {
        PyErr_Format(PyExc_ValueError, "%s: not an aligned array of %zd-byte items", name, item_bytes);
        return -1; /* closed with its owner */
    }
    return 0;
}

void column_close(struct column *column)
{
    if (column->view.obj != NULL)
        PyBuffer_Release(&column->view);
}

PyObject *object_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords, initializer initialize)
{
    PyObject *self = type->tp_alloc(type, 0);
    if (self != NULL && initialize(self, arguments, keywords) < 0)
        Py_CLEAR(self);
    return self;
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

/* Key and namespace of each entry (BLOCK_ENTRY and KEY_ENTRY begin alike). The number of entries whose handle the
 * session has not opened; they are listed in `denied` and their keys are not filled in. */
static uint32_t read_keys(const uint8_t *entries, Py_ssize_t entry_bytes, uint32_t count, const Py_buffer *handles,
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

static int handles_open(PyObject *source, Py_buffer *handles)
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
    PyObject *answer = PyTuple_Pack(3, response, Py_None, Py_None);
    Py_DECREF(response);
    return answer;
}

/* Where each block lies and how much of it goes where. 1: plain. 0: it is not. */
static int place_all(HotPath *self, const struct request *r, uint64_t room, struct delivery *d)
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
    return d->count <= room;
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

static PyObject *retrieve(HotPath *self, const struct request *r, uint32_t lkey, uint64_t room, int counting)
{
    struct delivery d;
    uint8_t *results;
    if (!place_all(self, r, room, &d))
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
    if (!d.count)
        answer = PyTuple_Pack(3, response, Py_None, Py_None);
    else if (requests != NULL && held != NULL)
        answer = PyTuple_Pack(3, response, requests, held);
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
    return answer;
}

/* ---- Python's face ---- */

static PyObject *serve(HotPath *self, const Py_buffer *capsule, PyObject *const *arguments)
{
    struct request r;
    unsigned long lkey = PyLong_AsUnsignedLong(arguments[3]);
    long room = PyLong_AsLong(arguments[4]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyDict_Check(arguments[2])) {
        PyErr_SetString(PyExc_TypeError, "the open requests are a dict");
        return NULL;
    }
    if (lkey > UINT32_MAX || room < 0 || !read_header(capsule, &r))
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
    return retrieve(self, &r, (uint32_t)lkey, (uint64_t)room, arguments[5] == Py_True);
}

static PyObject *py_serve(HotPath *self, PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer capsule;
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "serve(capsule, handles, open, lkey, room, counting)");
        return NULL;
    }
    if (PyObject_GetBuffer(arguments[0], &capsule, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *answer = serve(self, &capsule, arguments);
    PyBuffer_Release(&capsule);
    return answer;
}

static PyObject *number_list(const int64_t *numbers, uint32_t count)
{
    PyObject *list = PyList_New(count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, number);
    }
    return list;
}

/* find(entries, entry_bytes, handles): per entry the slot of its block, or -1, and the numbers of the entries that are
 * denied; None where the hash holds keys elsewhere. Expiry is the caller's. */
static PyObject *py_find(HotPath *self, PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer entries, handles;
    struct keys keys;
    uint32_t denied[BATCH_MAX];
    int64_t slots[BATCH_MAX], numbers[BATCH_MAX];
    Py_ssize_t entry_bytes = count == 3 ? PyLong_AsSsize_t(arguments[1]) : 0;
    if (entry_bytes < KEY_ENTRY_BYTES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "find(entries, entry_bytes, handles)");
        return NULL;
    }
    if (PyDict_GET_SIZE(self->homeless))
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(arguments[0], &entries, PyBUF_SIMPLE) < 0)
        return NULL;
    if (entries.len > BATCH_MAX * entry_bytes || handles_open(arguments[2], &handles) < 0) {
        PyBuffer_Release(&entries);
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    uint32_t size = (uint32_t)(entries.len / entry_bytes);
    uint32_t refused = read_keys(entries.buf, entry_bytes, size, &handles, &keys, denied);
    keys_find(self->keys, &keys, size, slots);
    for (uint32_t i = 0; i < refused; i++) {
        slots[denied[i]] = NO_SLOT;
        numbers[i] = denied[i];
    }
    PyBuffer_Release(&handles);
    PyBuffer_Release(&entries);
    PyObject *found = number_list(slots, size), *without = number_list(numbers, refused), *answer = NULL;
    if (found != NULL && without != NULL)
        answer = PyTuple_Pack(2, found, without);
    Py_XDECREF(found);
    Py_XDECREF(without);
    return answer;
}

static int hot_path_columns(HotPath *self, PyObject *columns, PyObject *hits, PyObject *after_hit)
{
    PyObject *length, *checksum, *expires_s, *stats;
    if (!PyArg_ParseTuple(columns, "OOOO", &length, &checksum, &expires_s, &stats))
        return -1;
    if (column_open(&self->length, length, 4, 0, "length") < 0 ||
        column_open(&self->checksum, checksum, 8, 0, "checksum") < 0 ||
        column_open(&self->expires_s, expires_s, 4, 0, "expires_s") < 0 ||
        column_open(&self->stats, stats, 8, 1, "stats") < 0)
        return -1;
    Py_ssize_t slots = (Py_ssize_t)self->keys->slots;
    int sized = self->length.count == slots && self->checksum.count == slots && self->expires_s.count == slots &&
                self->stats.count >= STATS && self->frames->block_states.count > (Py_ssize_t)self->frames->frames;
    if (sized && self->on_hit == NULL) {
        if (column_open(&self->hits, hits, 1, 1, "hits") < 0 || column_open(&self->after_hit, after_hit, 1, 0, "") < 0)
            return -1;
        sized = self->hits.count == slots && self->after_hit.count == 256;
    }
    if (!sized)
        PyErr_SetString(PyExc_ValueError, "the columns are not of one region");
    return sized ? 0 : -1;
}

static int hot_path_init(HotPath *self, PyObject *arguments, PyObject *keywords)
{
    PyObject *keys, *frames, *homeless, *columns, *hits, *after_hit, *on_hit, *wall_ns;
    unsigned long long address, frame_bytes;
    PyObject *module = PyType_GetModule(Py_TYPE(self));
    PyObject *const *types = module == NULL ? NULL : PyModule_GetState(module);
    if (types == NULL || keywords != NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "HotPath takes plain arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "O!O!O!O!OOOOKK", types[0], &keys, types[1], &frames, &PyDict_Type, &homeless,
                          &PyTuple_Type, &columns, &hits, &after_hit, &on_hit, &wall_ns, &address, &frame_bytes))
        return -1;
    self->keys = (KeyTable *)Py_NewRef(keys);
    self->frames = (Frames *)Py_NewRef(frames);
    self->homeless = Py_NewRef(homeless);
    self->on_hit = on_hit == Py_None ? NULL : Py_NewRef(on_hit);
    self->wall_ns = Py_NewRef(wall_ns);
    self->window_address = address;
    self->frame_bytes = frame_bytes;
    return hot_path_columns(self, columns, hits, after_hit);
}

static PyObject *hot_path_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    return object_new(type, arguments, keywords, (initializer)hot_path_init);
}

static int hot_path_traverse(HotPath *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->homeless);
    Py_VISIT(self->on_hit);
    Py_VISIT(self->wall_ns);
    return 0;
}

static void hot_path_free(HotPath *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    column_close(&self->length);
    column_close(&self->checksum);
    column_close(&self->expires_s);
    column_close(&self->stats);
    column_close(&self->hits);
    column_close(&self->after_hit);
    Py_XDECREF(self->keys);
    Py_XDECREF(self->frames);
    Py_XDECREF(self->homeless);
    Py_XDECREF(self->on_hit);
    Py_XDECREF(self->wall_ns);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"serve", (PyCFunction)(void (*)(void))py_serve, METH_FASTCALL,
     "serve(capsule, handles, open, lkey, room, counting): (response, RDMA requests, frames held) or None"},
    {"find", (PyCFunction)(void (*)(void))py_find, METH_FASTCALL,
     "find(entries, entry_bytes, handles): (slots, denied) or None"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, hot_path_new},
    {Py_tp_dealloc, hot_path_free},
    {Py_tp_traverse, hot_path_traverse},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec hot_path_spec = {
    "dpu_app.regions._hot_path.HotPath", sizeof(HotPath), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

/* The module's state: the types that HotPath takes. */
struct types {
    PyObject *key_table, *frames;
};

static int add_type(PyObject *module, PyType_Spec *spec, PyObject **kept)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL)
        return -1;
    if (kept != NULL)
        *kept = Py_NewRef(type);
    int added = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return added;
}

static int execute(PyObject *module)
{
    struct types *types = PyModule_GetState(module);
    if (add_type(module, &key_table_spec, &types->key_table) < 0 ||
        add_type(module, &frames_spec, &types->frames) < 0)
        return -1;
    return add_type(module, &hot_path_spec, NULL);
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
    struct types *types = PyModule_GetState(module);
    Py_VISIT(types->key_table);
    Py_VISIT(types->frames);
    return 0;
}

static int clear(PyObject *module)
{
    struct types *types = PyModule_GetState(module);
    Py_CLEAR(types->key_table);
    Py_CLEAR(types->frames);
    return 0;
}

static struct PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_hot_path", NULL, sizeof(struct types), NULL, module_slots, traverse, clear, NULL,
};

PyMODINIT_FUNC PyInit__hot_path(void)
{
    return PyModuleDef_Init(&module);
}
