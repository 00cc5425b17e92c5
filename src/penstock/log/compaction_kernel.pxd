# The C types of compaction_kernel.py; see columnar/kernel.pxd.

cimport cython

cdef Py_ssize_t SLOT_WORDS
cdef long long NO_TIMESTAMP
cdef unsigned long long _WORD_MASK


cdef class KeyTable:
    cdef readonly Py_ssize_t slots
    cdef readonly Py_ssize_t capacity
    cdef readonly Py_ssize_t count
    cdef unsigned long long[::1] words


@cython.locals(
    words="unsigned long long[::1]", high="unsigned long long", low="unsigned long long", place=Py_ssize_t,
    last=Py_ssize_t,
)
cpdef note_key(KeyTable table, bytes key, long long offset)

@cython.locals(
    words="unsigned long long[::1]", high="unsigned long long", low="unsigned long long", place=Py_ssize_t,
    last=Py_ssize_t,
)
cpdef long long last_offset(KeyTable table, bytes key)

@cython.locals(
    size=Py_ssize_t, at=Py_ssize_t, end=Py_ssize_t, length="long long", delta="long long",
    previous="long long", key_size="long long", _timestamp_delta="long long",
)
cpdef note_keys(
    KeyTable table, bytes body, long long count, long long base_offset, long long last_offset_delta
)

@cython.locals(
    size=Py_ssize_t, at=Py_ssize_t, rest=Py_ssize_t, start=Py_ssize_t, end=Py_ssize_t, run_start=Py_ssize_t,
    run_end=Py_ssize_t, length="long long", delta="long long", previous="long long", key_size="long long",
    value_size="long long", timestamp_delta="long long", timestamp="long long", max_timestamp="long long",
    kept_count="long long", tombstones="long long", stays=bint, _="long long",
)
cpdef tuple select(
    KeyTable table, bytes body, long long count, long long base_offset, long long last_offset_delta,
    long long base_timestamp, long long new_base_timestamp, long long drop_tombstones_below,
)

@cython.locals(value="unsigned long long", shift=int, byte="unsigned long long", half="long long")
cdef (long long, Py_ssize_t) varint(bytes body, Py_ssize_t at, Py_ssize_t end) noexcept

@cython.locals(byte="unsigned long long", encoded="unsigned long long")
cdef append_varint(bytearray output, long long value)
