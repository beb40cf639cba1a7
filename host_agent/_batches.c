/* From a caller's keys and memory to the entries of one capsule a region, and answers back to the caller's order.
 *
 * Optional: host_agent/native_batches.py uses it where it was built; host_agent/batch.py, common/placement.py and
 * common/wire.py do the same in numpy where it was not, under the same tests, byte for byte. It takes plain batches:
 * keys of 16 bytes, one piece of one memory a block, nothing to refuse. For all else it answers None and has done
 * nothing. What comes from a peer is checked before it is used. Little-endian only. No state.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define KEY_BYTES 16
#define KEY_ENTRY_BYTES 24
#define BLOCK_ENTRY_BYTES 64
#define HEADER_BYTES 40
#define BATCH_MAX (1 << 22)
#define REGIONS_MAX 4096

/* As common/placement.py lays out PodMap.table: `count` regions that take blocks, in order of their uuids. */
struct placed {
    uint64_t seed, index;
    double weight;
};
struct table {
    uint64_t count, is_equal;
    struct placed regions[];
};

/* common/wire.py: BLOCK_ENTRY. */
struct block_entry {
    unsigned char key[KEY_BYTES];
    uint32_t namespace, length, offset;
    uint16_t flags, sge_count;
    uint64_t address;
    uint32_t rkey, ttl_s;
    uint64_t checksum, reserved;
};
/* common/wire.py: KEY_ENTRY. */
struct key_entry {
    unsigned char key[KEY_BYTES];
    uint32_t namespace, argument;
};
/* common/wire.py: the header of a capsule. */
struct header {
    uint16_t magic;
    uint8_t version, op;
    uint16_t flags;
    uint8_t status, reserved0;
    uint16_t count, entry_bytes, sge_count, reserved1;
    uint32_t deadline_us, reserved2;
    uint64_t request_id, aux;
};
_Static_assert(sizeof(struct block_entry) == BLOCK_ENTRY_BYTES, "layout");
_Static_assert(sizeof(struct key_entry) == KEY_ENTRY_BYTES, "layout");
_Static_assert(sizeof(struct header) == HEADER_BYTES, "layout");

/* What every plan starts from: keys in one piece, and where each one goes. */
struct batch {
    Py_ssize_t count, regions;
    const unsigned char *keys;
    unsigned char *copied;  /* of a list */
    uint32_t *handles, *rkeys;
    uint64_t *ends;         /* by region: first its count, then where its entries end */
    uint16_t *chosen;       /* region of each key */
    uint32_t *sorting;      /* what `sorted` is within */
    const uint32_t *sorted; /* in which order blocks are written where it is not theirs: by address */
};

/* ------------------------------------------------------------------------------------------------- placement */

static uint64_t mixed(uint64_t h)
{
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ h >> 27) * 0x94D049BB133111EBull;
    return h ^ h >> 31;
}

/* common/placement.py: _negative_log, operation by operation. Built without contraction of products and sums. */
static double negative_log(uint64_t top)
{
    double x = (double)top + 0.5, mantissa, s, square, series;
    uint64_t bits;
    int64_t exponent;
    memcpy(&bits, &x, 8);
    exponent = (int64_t)(bits - 0x3FE6A09E667F3BCDull) >> 52;
    bits -= (uint64_t)exponent << 52;
    memcpy(&mantissa, &bits, 8);
    s = (mantissa - 1.0) / (mantissa + 1.0);
    square = s * s;
    series = square * 0.1111111111111111;
    series = (series + 0.14285714285714285) * square;
    series = (series + 0.2) * square;
    series = (series + 0.3333333333333333) * square;
    series = (series + 1.0) * s * -2.0;
    return series + (52.0 - (double)exponent) * 0.6931471805599453;
}

static uint64_t place(const struct table *table, const unsigned char *key)
{
    uint64_t lo, hi, best = 0;
    memcpy(&lo, key, 8);
    memcpy(&hi, key + 8, 8);
    lo ^= hi * 0x9E3779B97F4A7C15ull;
    if (table->is_equal) {
        uint64_t best_top = 0;
        for (uint64_t i = 0; i < table->count; i++) {
            uint64_t top = mixed(table->regions[i].seed ^ lo) >> 12;
            if (top > best_top) {
                best_top = top;
                best = i;
            }
        }
    } else {
        double best_score = 0.0;
        for (uint64_t i = 0; i < table->count; i++) {
            double score = negative_log(mixed(table->regions[i].seed ^ lo) >> 12) / table->regions[i].weight;
            if (i == 0 || score < best_score) {
                best_score = score;
                best = i;
            }
        }
    }
    return table->regions[best].index;
}

/* --------------------------------------------------------------------------------------------------- batches */

static void end_batch(struct batch *batch)
{
    PyMem_Free(batch->copied);
    PyMem_Free(batch->handles);
    PyMem_Free(batch->rkeys);
    PyMem_Free(batch->ends);
    PyMem_Free(batch->chosen);
    PyMem_Free(batch->sorting);
}

static uint32_t *numbers(PyObject *list, Py_ssize_t count)
{
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != count) {
        PyErr_SetString(PyExc_ValueError, "a list with a number for each region is wanted");
        return NULL;
    }
    uint32_t *values = PyMem_Malloc((count ? count : 1) * sizeof(uint32_t));
    if (values == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long value = PyLong_AsUnsignedLong(PyList_GET_ITEM(list, i));
        if (PyErr_Occurred() || value > UINT32_MAX) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a number of 32 bits is wanted");
            PyMem_Free(values);
            return NULL;
        }
        values[i] = (uint32_t)value;
    }
    return values;
}

/* 1: all keys are in one piece; 0: not plain keys; -1: an exception. */
static int take_keys(PyObject *keys, struct batch *batch)
{
    if (PyBytes_CheckExact(keys)) {
        batch->count = PyBytes_GET_SIZE(keys) / KEY_BYTES;
        batch->keys = (const unsigned char *)PyBytes_AS_STRING(keys);
        return PyBytes_GET_SIZE(keys) % KEY_BYTES == 0 && batch->count > 0 && batch->count <= BATCH_MAX;
    }
    if (!PyList_CheckExact(keys) || PyList_GET_SIZE(keys) == 0 || PyList_GET_SIZE(keys) > BATCH_MAX)
        return 0;
    batch->count = PyList_GET_SIZE(keys);
    batch->copied = PyMem_Malloc(batch->count * KEY_BYTES);
    if (batch->copied == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    batch->keys = batch->copied;
    for (Py_ssize_t i = 0; i < batch->count; i++) {
        PyObject *key = PyList_GET_ITEM(keys, i);
        if (!PyBytes_CheckExact(key) || PyBytes_GET_SIZE(key) != KEY_BYTES)
            return 0;
        memcpy(batch->copied + i * KEY_BYTES, PyBytes_AS_STRING(key), KEY_BYTES);
    }
    return 1;
}

static int check_table(const Py_buffer *view, Py_ssize_t regions)
{
    const struct table *table = view->buf;
    if (view->len < (Py_ssize_t)sizeof(struct table) || table->count == 0 || table->count > (uint64_t)regions ||
        regions > REGIONS_MAX || view->len != (Py_ssize_t)(sizeof(struct table) + table->count * sizeof(struct placed)))
        return 0;
    for (uint64_t i = 0; i < table->count; i++)
        if (table->regions[i].index >= (uint64_t)regions)
            return 0;
    return 1;
}

/* Choose a region for each key, and count. As take_keys. */
static int begin_batch(struct batch *batch, PyObject *keys, PyObject *table_bytes, PyObject *handles)
{
    Py_buffer view;
    int plain = take_keys(keys, batch);
    if (plain <= 0)
        return plain;
    if (PyObject_GetBuffer(table_bytes, &view, PyBUF_SIMPLE))
        return -1;
    batch->regions = PyList_CheckExact(handles) ? PyList_GET_SIZE(handles) : 0;
    if (!check_table(&view, batch->regions)) {
        PyErr_SetString(PyExc_ValueError, "this is no table of so many regions");
        goto failed;
    }
    batch->handles = numbers(handles, batch->regions);
    batch->ends = PyMem_Calloc(batch->regions, sizeof(uint64_t));
    batch->chosen = PyMem_Malloc(batch->count * sizeof(uint16_t));
    if (batch->handles == NULL || batch->ends == NULL || batch->chosen == NULL) {
        if (!PyErr_Occurred())
            PyErr_NoMemory();
        goto failed;
    }
    const struct table *table = view.buf;
    for (Py_ssize_t i = 0; i < batch->count; i++) {
        uint64_t region = table->count == 1 ? table->regions[0].index : place(table, batch->keys + i * KEY_BYTES);
        batch->chosen[i] = (uint16_t)region;
        batch->ends[region]++;
    }
    PyBuffer_Release(&view);
    return 1;
failed:
    PyBuffer_Release(&view);
    return -1;
}

/* Counts become the first place of each region; whoever writes an entry moves it on, so that at last they are ends. */
static void begin_places(struct batch *batch)
{
    uint64_t first = 0;
    for (Py_ssize_t region = 0; region < batch->regions; region++) {
        uint64_t count = batch->ends[region];
        batch->ends[region] = first;
        first += count;
    }
}

/* (body, order or None, ends); takes over the references of body and order. */
static PyObject *planned(struct batch *batch, PyObject *body, PyObject *order)
{
    PyObject *ends = PyTuple_New(batch->regions);
    for (Py_ssize_t region = 0; ends != NULL && region < batch->regions; region++) {
        PyObject *end = PyLong_FromUnsignedLongLong(batch->ends[region]);
        if (end == NULL)
            Py_CLEAR(ends);
        else
            PyTuple_SET_ITEM(ends, region, end);
    }
    PyObject *plan = NULL;
    if (ends != NULL)
        plan = PyTuple_Pack(3, body, order != NULL ? order : Py_None, ends);
    Py_DECREF(body);
    Py_XDECREF(order);
    Py_XDECREF(ends);
    return plan;
}

/* The body of `entry_bytes` a block, and the order where it is another than that of the keys. 0 or -1. */
static int make_body(struct batch *batch, Py_ssize_t entry_bytes, PyObject **body, PyObject **order)
{
    *order = NULL;
    *body = PyByteArray_FromStringAndSize(NULL, batch->count * entry_bytes);
    if (*body == NULL)
        return -1;
    if (batch->regions > 1 || batch->sorted != NULL) {
        *order = PyBytes_FromStringAndSize(NULL, batch->count * sizeof(int64_t));
        if (*order == NULL) {
            Py_CLEAR(*body);
            return -1;
        }
    }
    begin_places(batch);
    return 0;
}

/* keys(keys, table, handles, argument) -> (body, order, ends) or None */
static PyObject *plan_keys(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "keys(keys, table, handles, argument)");
        return NULL;
    }
    struct batch batch = {0};
    PyObject *result = NULL, *body, *order;
    unsigned long argument = PyLong_AsUnsignedLong(args[3]);
    if (PyErr_Occurred())
        return NULL;
    int plain = begin_batch(&batch, args[0], args[1], args[2]);
    if (plain > 0 && argument <= UINT32_MAX) {
        if (make_body(&batch, KEY_ENTRY_BYTES, &body, &order) == 0) {
            struct key_entry *entries = (struct key_entry *)PyByteArray_AS_STRING(body);
            int64_t *positions = order != NULL ? (int64_t *)PyBytes_AS_STRING(order) : NULL;
            for (Py_ssize_t i = 0; i < batch.count; i++) {
                uint64_t at = batch.ends[batch.chosen[i]]++;
                struct key_entry *entry = entries + at;
                memcpy(entry->key, batch.keys + i * KEY_BYTES, KEY_BYTES);
                entry->namespace = batch.handles[batch.chosen[i]];
                entry->argument = (uint32_t)argument;
                if (positions != NULL)
                    positions[at] = i;
            }
            result = planned(&batch, body, order);
        }
    } else if (plain >= 0) {
        result = Py_NewRef(Py_None);
    }
    end_batch(&batch);
    return result;
}

/* Sort `count` indices by their addresses, byte by byte of those in which addresses differ. `both` has room for twice as
 * many and holds 0, 1, 2... at first; returns the half of it with the result. */
static uint32_t *by_address(const uint64_t *addresses, Py_ssize_t count, uint64_t differing, uint32_t *both)
{
    uint32_t *from = both, *to = both + count;
    for (int shift = 0; shift < 64; shift += 8) {
        if ((differing >> shift & 0xFF) == 0)
            continue;
        Py_ssize_t firsts[256] = {0}, first = 0;
        for (Py_ssize_t i = 0; i < count; i++)
            firsts[addresses[i] >> shift & 0xFF]++;
        for (int digit = 0; digit < 256; digit++) {
            Py_ssize_t same = firsts[digit];
            firsts[digit] = first;
            first += same;
        }
        for (Py_ssize_t i = 0; i < count; i++)
            to[firsts[addresses[from[i]] >> shift & 0xFF]++] = from[i];
        uint32_t *swapped = from;
        from = to;
        to = swapped;
    }
    return from;
}

/* Whether ranges of `length` at these addresses are apart from each other. Where they do not ascend, batch->sorted says
 * in which order they do. */
static int are_apart(struct batch *batch, const uint64_t *addresses, uint64_t length)
{
    Py_ssize_t count = batch->count;
    uint64_t differing = 0;
    int ascend = 1;
    for (Py_ssize_t i = 1; i < count; i++) {
        differing |= addresses[i] ^ addresses[0];
        ascend &= addresses[i] >= addresses[i - 1] && addresses[i] - addresses[i - 1] >= length;
    }
    if (ascend)
        return 1;
    batch->sorting = PyMem_Malloc(2 * count * sizeof(uint32_t));
    if (batch->sorting == NULL)
        return 0; /* the general way finds out */
    for (Py_ssize_t i = 0; i < count; i++)
        batch->sorting[i] = (uint32_t)i;
    const uint32_t *sorted = batch->sorted = by_address(addresses, count, differing, batch->sorting);
    int apart = 1;
    for (Py_ssize_t i = 1; i < count; i++)
        apart &= addresses[sorted[i]] - addresses[sorted[i - 1]] >= length;
    return apart;
}

/* Whether nothing is to be refused: pieces of one size that the wire can carry, apart where they are written to. */
static int is_plain_memory(struct batch *batch, const Py_buffer *addresses, const Py_buffer *lengths, int must_be_apart)
{
    Py_ssize_t count = batch->count;
    if (addresses->len != count * 8 || lengths->len != count * 8)
        return 0;
    const uint64_t *sizes = lengths->buf;
    uint64_t size = sizes[0];
    if (size > UINT32_MAX || (must_be_apart && size == 0))
        return 0;
    for (Py_ssize_t i = 1; i < count; i++)
        if (sizes[i] != size)
            return 0;
    return !must_be_apart || are_apart(batch, addresses->buf, size);
}

static void fill_blocks(struct batch *batch, PyObject *body, PyObject *order, const uint64_t *addresses,
                        uint32_t length, const unsigned long *offset_ttl_flags)
{
    struct block_entry *entries = (struct block_entry *)PyByteArray_AS_STRING(body);
    int64_t *positions = order != NULL ? (int64_t *)PyBytes_AS_STRING(order) : NULL;
    struct block_entry entry = {
        .length = length,
        .offset = (uint32_t)offset_ttl_flags[0],
        .ttl_s = (uint32_t)offset_ttl_flags[1],
        .flags = (uint16_t)offset_ttl_flags[2],
        .sge_count = 1,
    };
    for (Py_ssize_t turn = 0; turn < batch->count; turn++) {
        Py_ssize_t i = batch->sorted != NULL ? (Py_ssize_t)batch->sorted[turn] : turn;
        uint16_t region = batch->chosen[i];
        uint64_t at = batch->ends[region]++;
        memcpy(entry.key, batch->keys + i * KEY_BYTES, KEY_BYTES);
        entry.namespace = batch->handles[region];
        entry.rkey = batch->rkeys[region];
        entry.address = addresses[i];
        entries[at] = entry;
        if (positions != NULL)
            positions[at] = i;
    }
}

/* blocks(keys, table, handles, rkeys, addresses, lengths, offset, ttl_s, flags, must_be_apart)
 * -> (body, order, ends) or None */
static PyObject *plan_blocks(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 10) {
        PyErr_SetString(PyExc_TypeError, "blocks() takes ten arguments");
        return NULL;
    }
    unsigned long numbers_given[3];
    for (int i = 0; i < 3; i++) {
        numbers_given[i] = PyLong_AsUnsignedLong(args[6 + i]);
        if (PyErr_Occurred())
            return NULL;
    }
    int must_be_apart = PyObject_IsTrue(args[9]);
    if (must_be_apart < 0)
        return NULL;
    Py_buffer addresses, lengths;
    if (PyObject_GetBuffer(args[4], &addresses, PyBUF_SIMPLE))
        return NULL;
    if (PyObject_GetBuffer(args[5], &lengths, PyBUF_SIMPLE)) {
        PyBuffer_Release(&addresses);
        return NULL;
    }
    struct batch batch = {0};
    PyObject *result = NULL, *body, *order;
    int plain = begin_batch(&batch, args[0], args[1], args[2]);
    if (plain > 0)
        plain = numbers_given[0] <= UINT32_MAX && numbers_given[1] <= UINT32_MAX && numbers_given[2] <= UINT16_MAX &&
                is_plain_memory(&batch, &addresses, &lengths, must_be_apart);
    if (plain > 0) {
        batch.rkeys = numbers(args[3], batch.regions);
        if (batch.rkeys != NULL && make_body(&batch, BLOCK_ENTRY_BYTES, &body, &order) == 0) {
            fill_blocks(&batch, body, order, addresses.buf, (uint32_t)*(const uint64_t *)lengths.buf, numbers_given);
            result = planned(&batch, body, order);
        }
    } else if (plain == 0) {
        result = Py_NewRef(Py_None);
    }
    end_batch(&batch);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&addresses);
    return result;
}

/* --------------------------------------------------------------------------------------------------- answers */

/* response(capsule, known) -> (request_id, op, status, aux, bytes of entries) or None, where common.wire says why not.
 * `known`: for each operation the size of its answers' entries, 256 u16; then for each status whether there is one. */
static PyObject *open_response(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 2 || !PyBytes_CheckExact(args[1]) || PyBytes_GET_SIZE(args[1]) != 256 * 2 + 256) {
        PyErr_SetString(PyExc_TypeError, "response(capsule, known)");
        return NULL;
    }
    Py_buffer view;
    struct header header;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE))
        return NULL;
    Py_ssize_t size = view.len;
    if (size >= HEADER_BYTES)
        memcpy(&header, view.buf, HEADER_BYTES);
    PyBuffer_Release(&view);
    if (size < HEADER_BYTES)
        Py_RETURN_NONE;
    const unsigned char *known = (const unsigned char *)PyBytes_AS_STRING(args[1]);
    uint16_t entry_bytes;
    memcpy(&entry_bytes, known + 2 * header.op, 2);
    if (header.magic != 0x4E45 || header.version != 1 || entry_bytes == 0 || header.entry_bytes != entry_bytes ||
        header.flags != 1 || header.reserved0 || header.reserved1 || header.reserved2 || header.sge_count ||
        header.count > 512 || !known[512 + header.status] || HEADER_BYTES + header.count * entry_bytes != size)
        Py_RETURN_NONE;
    return Py_BuildValue("KiiKn", (unsigned long long)header.request_id, (int)header.op, (int)header.status,
                         (unsigned long long)header.aux, size - HEADER_BYTES);
}

/* scatter(answers, entry_bytes, order, first, entries): entry i goes to place order[first + i] of the answers. */
static PyObject *scatter(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 5 || !PyByteArray_CheckExact(args[0]) || !PyBytes_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "scatter(answers, entry_bytes, order, first, entries)");
        return NULL;
    }
    Py_ssize_t entry_bytes = PyLong_AsSsize_t(args[1]), first = PyLong_AsSsize_t(args[3]);
    Py_buffer entries;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[4], &entries, PyBUF_SIMPLE))
        return NULL;
    const int64_t *order = (const int64_t *)PyBytes_AS_STRING(args[2]);
    Py_ssize_t ordered = PyBytes_GET_SIZE(args[2]) / (Py_ssize_t)sizeof(int64_t);
    char *answers = PyByteArray_AS_STRING(args[0]);
    int fits = entry_bytes > 0 && first >= 0 && first <= ordered;
    Py_ssize_t count = fits ? entries.len / entry_bytes : 0;
    Py_ssize_t places = fits ? PyByteArray_GET_SIZE(args[0]) / entry_bytes : 0;
    fits = fits && entries.len % entry_bytes == 0 && count <= ordered - first;
    for (Py_ssize_t i = 0; fits && i < count; i++)
        fits = order[first + i] >= 0 && order[first + i] < places;
    for (Py_ssize_t i = 0; fits && i < count; i++)
        memcpy(answers + order[first + i] * entry_bytes, (const char *)entries.buf + i * entry_bytes, entry_bytes);
    PyBuffer_Release(&entries);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "these entries do not fit these answers");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------------------------------------------- places */

/* pieces(buffers) -> (addresses, lengths, lowest address, end of the highest) of a list of writable buffers of bytes, in
 * one piece each and none of them empty; u64 each. None for anything else in the list. */
static PyObject *describe_pieces(PyObject *self, PyObject *buffers)
{
    (void)self;
    if (!PyList_CheckExact(buffers) || PyList_GET_SIZE(buffers) == 0 || PyList_GET_SIZE(buffers) > BATCH_MAX)
        Py_RETURN_NONE;
    Py_ssize_t count = PyList_GET_SIZE(buffers);
    PyObject *addresses = PyByteArray_FromStringAndSize(NULL, count * 8);
    PyObject *lengths = PyByteArray_FromStringAndSize(NULL, count * 8);
    uint64_t lowest = UINT64_MAX, end = 0;
    int plain = addresses != NULL && lengths != NULL;
    for (Py_ssize_t i = 0; plain && i < count; i++) {
        Py_buffer view;
        if (i >= PyList_GET_SIZE(buffers)) /* an item written in Python may change the list */
            plain = 0;
        if (!plain)
            break;
        PyObject *buffer = Py_NewRef(PyList_GET_ITEM(buffers, i));
        plain = PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_ND) == 0;
        Py_DECREF(buffer);
        if (!plain)
            break;
        uint64_t address = (uint64_t)(uintptr_t)view.buf, length = (uint64_t)view.len;
        plain = view.itemsize == 1 && length > 0 && length <= UINT32_MAX &&
                (view.format == NULL || (strchr("Bbc", view.format[0]) != NULL && view.format[1] == 0));
        PyBuffer_Release(&view);
        ((uint64_t *)PyByteArray_AS_STRING(addresses))[i] = address;
        ((uint64_t *)PyByteArray_AS_STRING(lengths))[i] = length;
        lowest = address < lowest ? address : lowest;
        end = address + length > end ? address + length : end;
    }
    PyObject *result = NULL;
    if (addresses != NULL && lengths != NULL) {
        PyErr_Clear(); /* the general way says what is wrong with it */
        if (plain)
            result = Py_BuildValue("OOKK", addresses, lengths, (unsigned long long)lowest, (unsigned long long)end);
        else
            result = Py_NewRef(Py_None);
    }
    Py_XDECREF(addresses);
    Py_XDECREF(lengths);
    return result;
}

static PyMethodDef methods[] = {
    {"pieces", describe_pieces, METH_O, "Where buffers are."},
    {"keys", (PyCFunction)(void (*)(void))plan_keys, METH_FASTCALL, "Entries of keys alone, by region."},
    {"blocks", (PyCFunction)(void (*)(void))plan_blocks, METH_FASTCALL, "Entries of blocks in memory, by region."},
    {"response", (PyCFunction)(void (*)(void))open_response, METH_FASTCALL, "The header of an answer."},
    {"scatter", (PyCFunction)(void (*)(void))scatter, METH_FASTCALL, "Answers to where they belong."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_batches", "Plain batches, natively.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__batches(void)
{
    return PyModule_Create(&module);
}
