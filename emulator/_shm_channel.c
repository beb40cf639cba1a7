/* The plain case of emu-shm's data path: READs and WRITEs into mapped memory, and messages that fit the ring.
 *
 * Optional: fabric_shm_initiator.py and fabric_shm_messages.py use it where it was built and do the same in Python where
 * it was not, under the same tests; they also do whatever this code declines, which is everything but plain success.
 * The layout of the shared pages and the order of stores are those of fabric_shm_pages.py. What the peer can write
 * (both control pages, its table) is read once, checked and only then used; nothing of it is trusted to be an address.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* 32-bit words of a control page. */
enum { CLOSED = 1, POSTED = 2, RECEIVED = 3, BUSY = 16, TARGET = 17, SENT = 32, ARMED = 48, POSTED_SIZES = 64 };
enum { RING_SLOTS = 1024 };
/* 64-bit words of it. */
enum { BASE = 9, LENGTH = 10, SLOTS = 640 };
#define IN_SOCKET 0xFFFFFFFFu
enum { RING_OFFSET_BYTES = 16384, RING_BYTES = 131072, LINE_BYTES = 64 };
enum { IDLE = 0, WRITING = 1, READING = 2 };
/* 64-bit words of a region table. */
enum { TABLE_SLOTS = 4096, WORDS = 8 };

#define TRANSFER_BYTES_MAX ((uint32_t)1 << 30)
/* From here on stores go past the cache: no line is read or taken from the other core's cache to be overwritten. With
 * another core reading the result this is 1.0 (4 KiB) to 1.5 times as fast as memcpy, and 4 to 5 times where memcpy is
 * glibc's `rep movsb` on a Zen core and the two addresses are close modulo the page (glibc bug 30994). */
#define STREAM_BYTES_MIN 4096
#define UNLOCKED_BYTES_MIN 262144 /* less is copied before another thread could give the interpreter's lock back */
enum { CHUNK = 64, SETS = 64, WAYS = 4, REMOTE_WRITE = 2, REMOTE_READ = 4 };

/* ------------------------------------------------------------------------------------------- local regions */

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

static Row *home(const Regions *self, uint32_t lkey)
{
    uint32_t at = lkey & self->mask;
    while (self->rows[at].lkey != 0 && self->rows[at].lkey != lkey)
        at = (at + 1) & self->mask;
    return &self->rows[at];
}

/* Whether the range lies in the region of this key, which may be written where `writable`. */
static int is_local(const Regions *self, uint32_t lkey, uint64_t address, uint64_t length, int writable)
{
    const Row *row = home(self, lkey);
    return lkey != 0 && row->lkey == lkey && address >= row->address && address <= row->end &&
           length <= row->end - address && (!writable || row->can_write);
}

static int resize(Regions *self, uint32_t size)
{
    Row *old = self->rows, *rows = PyMem_Calloc(size, sizeof(Row));
    uint32_t old_size = old == NULL ? 0 : self->mask + 1;
    if (rows == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    self->rows = rows;
    self->mask = size - 1;
    for (uint32_t at = 0; at < old_size; at++)
        if (old[at].lkey != 0)
            *home(self, old[at].lkey) = old[at];
    PyMem_Free(old);
    return 1;
}

static PyObject *regions_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, "") || (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0))
        return NULL;
    Regions *self = (Regions *)type->tp_alloc(type, 0);
    if (self != NULL && !resize(self, 16)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void regions_dealloc(Regions *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->rows);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *regions_add(Regions *self, PyObject *args)
{
    unsigned int lkey;
    unsigned long long address, length;
    int can_write;
    if (!PyArg_ParseTuple(args, "IKKp", &lkey, &address, &length, &can_write))
        return NULL;
    if (lkey == 0 || address > UINT64_MAX - length)
        return PyErr_Format(PyExc_ValueError, "no region: key %u, 0x%llx+%llu", lkey, address, length);
    if (2 * (self->used + 1) > self->mask && !resize(self, 2 * (self->mask + 1)))
        return NULL;
    Row *row = home(self, lkey);
    self->used += row->lkey == 0;
    *row = (Row){address, address + length, lkey, can_write};
    Py_RETURN_NONE;
}

static PyObject *regions_remove(Regions *self, PyObject *argument)
{
    uint32_t lkey = (uint32_t)PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred())
        return NULL;
    Row *row = home(self, lkey);
    if (lkey == 0 || row->lkey != lkey)
        Py_RETURN_NONE;
    row->lkey = 0;
    self->used--;
    /* What was pushed past the hole moves into it, so that a search may stop at an empty place. */
    for (uint32_t at = ((uint32_t)(row - self->rows) + 1) & self->mask; self->rows[at].lkey != 0;
         at = (at + 1) & self->mask) {
        Row moved = self->rows[at];
        self->rows[at].lkey = 0;
        *home(self, moved.lkey) = moved;
    }
    Py_RETURN_NONE;
}

static PyMethodDef regions_methods[] = {
    {"add", (PyCFunction)regions_add, METH_VARARGS, "add(lkey, address, length_bytes, can_write)"},
    {"remove", (PyCFunction)regions_remove, METH_O, "remove(lkey)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot regions_slots[] = {
    {Py_tp_doc, "The registered regions of one protection domain, by lkey."},
    {Py_tp_new, regions_new},
    {Py_tp_dealloc, regions_dealloc},
    {Py_tp_methods, regions_methods},
    {0, NULL},
};

static PyType_Spec regions_spec = {
    .name = "emulator._shm_channel.Regions",
    .basicsize = sizeof(Regions),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = regions_slots,
};

/* ------------------------------------------------------------------------------------------------- channel */

/* A region of the peer that is mapped here. `word` is what its slot of the peer's table must still say. */
typedef struct {
    uint64_t word, low, end, delta;
    uint32_t rkey; /* 0: none */
    uint32_t slot, access;
} Remote;

typedef struct {
    PyObject_HEAD
    Regions *regions;
    unsigned char *own, *theirs; /* control pages; NULL when detached */
    const unsigned char *table;
    int bell;
    Remote remotes[SETS][WAYS]; /* by rkey modulo SETS, the last learned first */
} Channel;

/* `RDMA_REQUEST` of doca_shims.api. */
typedef struct {
    uint64_t local, remote;
    uint32_t length, lkey, rkey, reserved;
} Request;

/* A request that may be carried out if the peer's table still says `word`. */
typedef struct {
    unsigned char *local, *far;
    uint64_t remote, word;
    uint32_t length, slot;
} Part;

static uint32_t *word_at(unsigned char *page, unsigned index)
{
    return (uint32_t *)(void *)page + index;
}

static uint64_t *quad_at(unsigned char *page, unsigned index)
{
    return (uint64_t *)(void *)page + index;
}

static uint32_t load(unsigned char *page, unsigned index)
{
    return __atomic_load_n(word_at(page, index), __ATOMIC_ACQUIRE);
}

static void store(unsigned char *page, unsigned index, uint32_t value)
{
    __atomic_store_n(word_at(page, index), value, __ATOMIC_RELEASE);
}

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

/* The initiator's side of the scheme. 0: the region or the connection is not what it was. */
static int transfer_part(Channel *self, const Part *part, int write)
{
    unsigned char *theirs = self->theirs;
    __atomic_store_n(word_at(theirs, TARGET), (uint32_t)part->word, __ATOMIC_RELAXED);
    __atomic_store_n(quad_at(theirs, BASE), part->remote, __ATOMIC_RELAXED);
    __atomic_store_n(quad_at(theirs, LENGTH), part->length, __ATOMIC_RELAXED);
    store(theirs, BUSY, write ? WRITING : READING);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    int valid = still_valid(self, part);
    if (valid && write)
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

static int resolve(const Channel *self, const Request *request, int write, Part *part)
{
    const Remote *remote = find(self, request->rkey);
    uint64_t length = request->length;
    if (!is_local(self->regions, request->lkey, request->local, length, !write))
        return 0;
    if (length == 0) {
        part->length = 0;
        return 1;
    }
    if (remote == NULL || length > TRANSFER_BYTES_MAX || !(remote->access & (write ? REMOTE_WRITE : REMOTE_READ)) ||
        request->remote < remote->low || request->remote > remote->end || length > remote->end - request->remote)
        return 0;
    part->local = (unsigned char *)(uintptr_t)request->local;
    part->far = (unsigned char *)(uintptr_t)(request->remote + remote->delta);
    part->remote = request->remote;
    part->word = remote->word;
    part->length = request->length;
    part->slot = remote->slot;
    return 1;
}

static int transfer_parts(Channel *self, const Part *parts, int count, int write)
{
    int done = 0;
    while (done < count && (parts[done].length == 0 || transfer_part(self, &parts[done], write)))
        done++;
    return done;
}

/* transfer(requests, first, write): packed requests from the number `first` on, in order, until one is not plain: its
 * number. What is checked is a copy of each request, made while the interpreter is locked. */
static PyObject *channel_transfer(Channel *self, PyObject *const *args, Py_ssize_t count_args)
{
    if (count_args != 3)
        return PyErr_Format(PyExc_TypeError, "transfer(requests, first, write)");
    Py_ssize_t index = PyLong_AsSsize_t(args[1]);
    int write = PyObject_IsTrue(args[2]);
    if (PyErr_Occurred())
        return NULL;
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_ssize_t total = view.len / (Py_ssize_t)sizeof(Request);
    int go_on = self->theirs != NULL && index >= 0;
    while (go_on && index < total) {
        Part parts[CHUNK];
        uint64_t bytes = 0;
        int count = 0;
        while (count < CHUNK && index + count < total) {
            Request request;
            memcpy(&request, (const char *)view.buf + (index + count) * (Py_ssize_t)sizeof request, sizeof request);
            if (!resolve(self, &request, write, &parts[count]))
                break;
            bytes += request.length;
            count++;
        }
        int done;
        if (bytes >= UNLOCKED_BYTES_MIN) {
            Py_BEGIN_ALLOW_THREADS
            done = transfer_parts(self, parts, count, write);
            Py_END_ALLOW_THREADS
        } else {
            done = transfer_parts(self, parts, count, write);
        }
        index += done;
        go_on = done == CHUNK;
    }
    PyBuffer_Release(&view);
    return PyLong_FromSsize_t(index);
}

/* count(requests): how many there are; 0 where it is no whole number, or something is in a reserved field. */
static PyObject *channel_count(PyObject *Py_UNUSED(self), PyObject *argument)
{
    Py_buffer view;
    if (PyObject_GetBuffer(argument, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_ssize_t count = view.len % (Py_ssize_t)sizeof(Request) == 0 ? view.len / (Py_ssize_t)sizeof(Request) : 0;
    uint32_t reserved = 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        Request request;
        memcpy(&request, (const char *)view.buf + at * (Py_ssize_t)sizeof request, sizeof request);
        reserved |= request.reserved;
    }
    PyBuffer_Release(&view);
    return PyLong_FromSsize_t(reserved == 0 ? count : 0);
}

/* 1: there they are. 0: a negative or huge one, which is for the Python code to judge. -1: an exception. */
static int parse_numbers(PyObject *const *args, Py_ssize_t count_args, uint64_t *numbers, Py_ssize_t wanted)
{
    if (count_args != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd numbers are wanted", wanted);
        return -1;
    }
    for (Py_ssize_t at = 0; at < wanted; at++) {
        numbers[at] = PyLong_AsUnsignedLongLong(args[at]);
        if (numbers[at] == (uint64_t)-1 && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_OverflowError))
                return -1;
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* send(sent, head, address, length, lkey): put message number `sent` into the peer's ring at `head`, and ring its bell
 * if it may be asleep. The next head; -1: not a plain case, and nothing was done. */
static PyObject *channel_send(Channel *self, PyObject *const *args, Py_ssize_t count_args)
{
    uint64_t numbers[5];
    int parsed = parse_numbers(args, count_args, numbers, 5);
    if (parsed <= 0)
        return parsed < 0 ? NULL : PyLong_FromLong(-1);
    uint32_t sent = (uint32_t)numbers[0];
    uint64_t head = numbers[1], address = numbers[2], length = numbers[3];
    unsigned char *theirs = self->theirs;
    if (theirs == NULL || numbers[4] > UINT32_MAX || length > RING_BYTES ||
        !is_local(self->regions, (uint32_t)numbers[4], address, length, 0))
        return PyLong_FromLong(-1);
    if (load(theirs, CLOSED) || load(theirs, POSTED) == sent ||
        length > load(theirs, POSTED_SIZES + sent % RING_SLOTS))
        return PyLong_FromLong(-1);
    if (load(theirs, RECEIVED) == sent)
        head = 0;
    if (head > RING_BYTES || length > RING_BYTES - head)
        return PyLong_FromLong(-1);
    memcpy(theirs + RING_OFFSET_BYTES + head, (const void *)(uintptr_t)address, length);
    __atomic_store_n(quad_at(theirs, SLOTS + sent % RING_SLOTS), head << 32 | length, __ATOMIC_RELAXED);
    store(theirs, SENT, sent + 1);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (load(theirs, ARMED)) {
        uint64_t one = 1;
        store(theirs, ARMED, 0);
        if (write(self->bell, &one, sizeof one) < 0)
            one = 0; /* the counter is at its end, which is as loud as it gets */
    }
    return PyLong_FromUnsignedLongLong((head + length + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES);
}

/* receive(received, address, length, lkey): message number `received` out of the own ring into a posted receive. Its
 * size; -1: not a plain case, and nothing was done. */
static PyObject *channel_receive(Channel *self, PyObject *const *args, Py_ssize_t count_args)
{
    uint64_t numbers[4];
    int parsed = parse_numbers(args, count_args, numbers, 4);
    if (parsed <= 0)
        return parsed < 0 ? NULL : PyLong_FromLong(-1);
    uint32_t received = (uint32_t)numbers[0];
    uint64_t address = numbers[1], length = numbers[2];
    unsigned char *own = self->own;
    /* The peer takes a message back that the socket had no room for, perhaps after it was taken from the ring. */
    if (own == NULL || load(own, SENT) - received - 1 >= RING_SLOTS)
        return PyLong_FromLong(-1);
    uint64_t slot = __atomic_load_n(quad_at(own, SLOTS + received % RING_SLOTS), __ATOMIC_RELAXED);
    uint64_t place = slot >> 32, size = slot & UINT32_MAX;
    if (place > RING_BYTES || size > RING_BYTES - place || size > length || numbers[3] > UINT32_MAX ||
        !is_local(self->regions, (uint32_t)numbers[3], address, length, 1))
        return PyLong_FromLong(-1);
    memcpy((void *)(uintptr_t)address, own + RING_OFFSET_BYTES + place, size);
    store(own, RECEIVED, received + 1);
    return PyLong_FromUnsignedLongLong(size);
}

/* learn(rkey, slot, word, low, end, access, delta): a region of the peer that is mapped here. */
static PyObject *channel_learn(Channel *self, PyObject *args)
{
    unsigned int rkey, slot, access;
    unsigned long long word, low, end, delta;
    if (!PyArg_ParseTuple(args, "IIKKKIK", &rkey, &slot, &word, &low, &end, &access, &delta))
        return NULL;
    if (slot >= TABLE_SLOTS || low > end || rkey == 0 || (uint32_t)word != rkey)
        return PyErr_Format(PyExc_ValueError, "no region: key %u, slot %u, 0x%llx to 0x%llx", rkey, slot, low, end);
    Remote *remotes = self->remotes[rkey % SETS];
    int way = 0;
    while (way < WAYS - 1 && remotes[way].rkey != 0 && remotes[way].rkey != rkey)
        way++;
    memmove(remotes + 1, remotes, (size_t)way * sizeof *remotes);
    remotes[0] = (Remote){word, low, end, delta, rkey, slot, access};
    Py_RETURN_NONE;
}

static PyObject *channel_forget(Channel *self, PyObject *Py_UNUSED(none))
{
    memset(self->remotes, 0, sizeof self->remotes);
    Py_RETURN_NONE;
}

static PyObject *channel_detach(Channel *self, PyObject *Py_UNUSED(none))
{
    self->own = self->theirs = NULL;
    self->table = NULL;
    memset(self->remotes, 0, sizeof self->remotes);
    Py_RETURN_NONE;
}

static PyObject *channel_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *regions_type = PyObject_GetAttrString(PyType_GetModule(type), "Regions");
    if (regions_type == NULL)
        return NULL;
    PyObject *regions;
    unsigned long long own, theirs, table;
    int bell;
    int good = PyArg_ParseTuple(args, "O!KKKi", regions_type, &regions, &own, &theirs, &table, &bell);
    Py_DECREF(regions_type);
    if (!good)
        return NULL;
    Channel *self = (Channel *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->regions = (Regions *)Py_NewRef(regions);
    self->own = (unsigned char *)(uintptr_t)own;
    self->theirs = (unsigned char *)(uintptr_t)theirs;
    self->table = (const unsigned char *)(uintptr_t)table;
    self->bell = bell;
    return (PyObject *)self;
}

static void channel_dealloc(Channel *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->regions);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef channel_methods[] = {
    {"transfer", (PyCFunction)(void (*)(void))channel_transfer, METH_FASTCALL, "transfer(requests, first, write)"},
    {"count", channel_count, METH_O | METH_STATIC, "count(requests)"},
    {"send", (PyCFunction)(void (*)(void))channel_send, METH_FASTCALL, "send(sent, head, address, length, lkey)"},
    {"receive", (PyCFunction)(void (*)(void))channel_receive, METH_FASTCALL, "receive(received, address, length, lkey)"},
    {"learn", (PyCFunction)channel_learn, METH_VARARGS, "learn(rkey, slot, word, low, end, access, delta)"},
    {"forget", (PyCFunction)channel_forget, METH_NOARGS, "Forget what was learned."},
    {"detach", (PyCFunction)channel_detach, METH_NOARGS, "Use none of the pages any more."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot channel_slots[] = {
    {Py_tp_doc, "Channel(regions, own page, their page, their table, their bell): addresses, and a descriptor."},
    {Py_tp_new, channel_new},
    {Py_tp_dealloc, channel_dealloc},
    {Py_tp_methods, channel_methods},
    {0, NULL},
};

static PyType_Spec channel_spec = {
    .name = "emulator._shm_channel.Channel",
    .basicsize = sizeof(Channel),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = channel_slots,
};

/* -------------------------------------------------------------------------------------------------- module */

static PyObject *fence(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"fence", fence, METH_NOARGS, "A full memory fence."},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL)
        return -1;
    int outcome = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return outcome;
}

static int execute(PyObject *module)
{
    if (add_type(module, &regions_spec) < 0 || add_type(module, &channel_spec) < 0)
        return -1;
    PyObject *layout = Py_BuildValue(
        "(iiiiiiiiiiiiIiiiiii)", CLOSED, POSTED, RECEIVED, BUSY, TARGET, SENT, ARMED, POSTED_SIZES, RING_SLOTS, BASE,
        LENGTH, SLOTS, IN_SOCKET, RING_OFFSET_BYTES, RING_BYTES, WRITING, READING, TABLE_SLOTS, WORDS);
    if (layout == NULL)
        return -1;
    int outcome = PyModule_AddObjectRef(module, "LAYOUT", layout);
    Py_DECREF(layout);
    return outcome;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_shm_channel", NULL, 0, module_methods, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__shm_channel(void)
{
    return PyModuleDef_Init(&definition);
}
