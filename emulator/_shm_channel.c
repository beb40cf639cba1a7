/* The plain case of emu-shm's data path: READs and WRITEs that succeed, and messages that fit the ring.
 *
 * Optional: fabric_shm_initiator.py and fabric_shm_messages.py use it where it was built and do the same in Python where
 * it was not, under the same tests; they also do whatever this code declines, which is everything but plain success.
 * The layout of the shared pages and the order of stores are those of fabric_shm_pages.py. What the peer can write
 * (both control pages, its table) is read once, checked and only then used; nothing of it is trusted to be an address.
 */
#include "_shm_channel.h"

#include <string.h>
#include <unistd.h>

#define UNLOCKED_BYTES_MIN 262144 /* less is copied before another thread could give the interpreter's lock back */
#define CHUNK 64 /* requests that are checked before the first of them is copied */

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
            if (!shm_resolve(self, &request, write, &parts[count]))
                break;
            bytes += request.length;
            count++;
        }
        int done;
        if (bytes >= UNLOCKED_BYTES_MIN) {
            Py_BEGIN_ALLOW_THREADS
            done = shm_transfer(self, parts, count, write);
            Py_END_ALLOW_THREADS
        } else {
            done = shm_transfer(self, parts, count, write);
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
        !shm_is_local(self->regions, (uint32_t)numbers[4], address, length, 0))
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
        !shm_is_local(self->regions, (uint32_t)numbers[3], address, length, 1))
        return PyLong_FromLong(-1);
    memcpy((void *)(uintptr_t)address, own + RING_OFFSET_BYTES + place, size);
    store(own, RECEIVED, received + 1);
    return PyLong_FromUnsignedLongLong(size);
}

/* learn(rkey, slot, word, low, end, access, delta or None): a region of the peer, mapped here or not. */
static PyObject *channel_learn(Channel *self, PyObject *args)
{
    unsigned int rkey, slot, access;
    unsigned long long word, low, end, delta = 0;
    PyObject *where;
    if (!PyArg_ParseTuple(args, "IIKKKIO", &rkey, &slot, &word, &low, &end, &access, &where))
        return NULL;
    if (where != Py_None) {
        delta = PyLong_AsUnsignedLongLongMask(where);
        if (PyErr_Occurred())
            return NULL;
    }
    if (slot >= TABLE_SLOTS || low > end || rkey == 0 || (uint32_t)word != rkey)
        return PyErr_Format(PyExc_ValueError, "no region: key %u, slot %u, 0x%llx to 0x%llx", rkey, slot, low, end);
    Remote *remotes = self->remotes[rkey % SETS];
    int way = 0;
    while (way < WAYS - 1 && remotes[way].rkey != 0 && remotes[way].rkey != rkey)
        way++;
    memmove(remotes + 1, remotes, (size_t)way * sizeof *remotes);
    remotes[0] = (Remote){word, low, end, delta, rkey, slot, access, where != Py_None};
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
    int bell, pid, pidfd;
    int good = PyArg_ParseTuple(args, "O!KKKiii", regions_type, &regions, &own, &theirs, &table, &bell, &pid, &pidfd);
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
    self->pid = pid;
    self->pidfd = pidfd;
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
    {Py_tp_doc, "Channel(regions, own page, their page, their table, their bell, their process, and its pidfd)."},
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
    if (add_type(module, &shm_regions_spec) < 0 || add_type(module, &channel_spec) < 0)
        return -1;
    PyObject *layout = Py_BuildValue(
        "(iiiiiiiiiiiiIiiiiiii)", CLOSED, POSTED, RECEIVED, BUSY, TARGET, SENT, ARMED, POSTED_SIZES, RING_SLOTS, BASE,
        LENGTH, SLOTS, IN_SOCKET, RING_OFFSET_BYTES, RING_BYTES, WRITING, READING, IN_KERNEL, TABLE_SLOTS, WORDS);
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
