# The C types of kernel.py. A name that is not here is a Python object, and slow; a function that is ``cdef`` is
# not seen from outside. ``noexcept``: raises nothing, so nobody looks for an exception after each call.

cimport cython

cdef long long ARRAY_BYTES_MAX
cdef bint COPIES_BY_LOOP
cdef Py_ssize_t HEADER_SIZE
cdef Py_ssize_t PREFIX_SIZE
cdef Py_ssize_t MAGIC_AT
cdef Py_ssize_t RECORD_BYTES_MIN
cdef long long RECORD_BYTES_MAX
cdef long long INT64_MAX
cdef long long MILLISECONDS_MAX
cdef long long OFFSET_MAX
cdef unsigned int CODEC_MASK
cdef unsigned int LOG_APPEND_TIME
cdef unsigned int TRANSACTIONAL
cdef unsigned int CONTROL
cdef unsigned long long MURMUR_MULTIPLIER
cdef unsigned long long MURMUR_SEED
cdef unsigned long long MASK_32


cdef class Section:
    cdef object body
    cdef Py_ssize_t position
    cdef Py_ssize_t end
    cdef long long base_offset
    cdef long long last_offset_delta
    cdef long long base_timestamp
    cdef long long max_timestamp
    cdef int timestamp_type
    cdef readonly Py_ssize_t count
    cdef readonly Py_ssize_t rows
    cdef readonly Py_ssize_t headers


cdef class Binary:
    cdef const int[::1] ends
    cdef const unsigned char[::1] data
    cdef const unsigned char[::1] validity
    cdef Py_ssize_t first_bit


cdef class Rows:
    cdef Binary key
    cdef Binary value
    cdef const long long[::1] timestamps
    cdef const int[::1] header_ends
    cdef Binary names
    cdef Binary contents
    cdef int[::1] sizes


@cython.locals(
    view="const unsigned char[::1]", size=Py_ssize_t, position=Py_ssize_t, batch_size=Py_ssize_t,
    base_offset="long long", last_offset="long long", last_offset_delta="long long",
    expected_offset="long long", next_offset="long long", bytes_left="long long", attributes="unsigned int",
    count="long long", is_wanted=bint, is_aborted=bint, is_marker=bint, body_at=Py_ssize_t,
    body_end=Py_ssize_t, pending_at=Py_ssize_t, section=Section,
)
cpdef tuple find(object records, long long start, long long end, object aborted, long long bytes_max)

@cython.locals(
    wants_headers=bint, row=Py_ssize_t, key_bytes="long long", value_bytes="long long",
    header_count="long long", key_nulls=Py_ssize_t, value_nulls=Py_ssize_t, section=Section,
    body="const unsigned char[::1]", at=Py_ssize_t, last=Py_ssize_t, stop=Py_ssize_t,
    base_offset="long long", last_offset_delta="long long", base_timestamp="long long",
    timestamp_type=int, timestamp="long long", previous_delta="long long", first_row=Py_ssize_t,
    first_header="long long", size="long long", timestamp_delta="long long", offset_delta="long long",
    key_size="long long", key_place=Py_ssize_t, value_size="long long", value_place=Py_ssize_t,
    headers="long long", header_place=Py_ssize_t, offset="long long", _="long long",
)
cpdef tuple measure(
    list sections, long long start, long long end, long long[::1] offsets, long long[::1] timestamps,
    int[::1] timestamp_types, int[::1] key_ends, int[::1] key_places, int[::1] value_ends,
    int[::1] value_places, int[::1] header_ends, int[::1] header_places,
)

@cython.locals(
    row=Py_ssize_t, header=Py_ssize_t, name_bytes="long long", value_bytes="long long", nulls=Py_ssize_t,
    section=Section, body="const unsigned char[::1]", at=Py_ssize_t, stop=Py_ssize_t,
    name_size="long long", value_size="long long", _="long long",
)
cpdef Py_ssize_t measure_headers(
    list sections, int[::1] header_ends, int[::1] header_places, int[::1] name_ends, int[::1] name_places,
    int[::1] value_ends, int[::1] value_places,
) except -1

@cython.locals(
    has_nulls=bint, row=Py_ssize_t, section=Section, body="const unsigned char[::1]", place=Py_ssize_t,
    begin=Py_ssize_t, size=Py_ssize_t, index=Py_ssize_t, _=Py_ssize_t,
)
cpdef object copy(
    list sections, bint of_headers, int[::1] ends, int[::1] places, unsigned char[::1] data,
    unsigned char[::1] validity,
)

@cython.locals(nulls=Py_ssize_t, row=Py_ssize_t)
cpdef Py_ssize_t mark_filled(int[::1] ends, Py_ssize_t rows, unsigned char[::1] validity) except -1

@cython.locals(
    key=Binary, value=Binary, names=Binary, contents=Binary, timestamps="const long long[::1]",
    header_ends="const int[::1]", sizes="int[::1]", has_headers=bint, header_count=Py_ssize_t,
    total="long long", row=Py_ssize_t, base_timestamp="long long", max_timestamp="long long",
    timestamp="long long", size="long long", begin=Py_ssize_t, stop=Py_ssize_t, header=Py_ssize_t,
)
cpdef tuple fit(Rows table, Py_ssize_t first, long long bytes_max)

@cython.locals(
    key=Binary, value=Binary, names=Binary, contents=Binary, timestamps="const long long[::1]",
    header_ends="const int[::1]", sizes="int[::1]", has_headers=bint, at=Py_ssize_t,
    base_timestamp="long long", row=Py_ssize_t, header=Py_ssize_t,
)
cpdef Py_ssize_t write(Rows table, Py_ssize_t first, Py_ssize_t rows, unsigned char[::1] output) except -1

@cython.locals(
    data="const unsigned char[::1]", ends="const int[::1]", row=Py_ssize_t, begin=Py_ssize_t,
    size=Py_ssize_t, whole=Py_ssize_t, at=Py_ssize_t, word="unsigned long long",
    hashed="unsigned long long",
)
cpdef object assign(Binary key, unsigned long long count, int[::1] partitions)

cdef unsigned int _uint32(const unsigned char[::1] view, Py_ssize_t at) noexcept

@cython.locals(value="long long")
cdef long long _int32(const unsigned char[::1] view, Py_ssize_t at) noexcept

cdef long long _int64(const unsigned char[::1] view, Py_ssize_t at) noexcept

@cython.locals(value="unsigned long long", shift=int, byte="unsigned long long", half="long long")
cdef (long long, Py_ssize_t) _varint(
    const unsigned char[::1] body, Py_ssize_t at, Py_ssize_t end
) noexcept

@cython.locals(size="long long")
cdef Py_ssize_t _skip_header(const unsigned char[::1] body, Py_ssize_t at, Py_ssize_t end) noexcept

cdef long long _microseconds(long long milliseconds) noexcept

@cython.locals(rest="long long", size="long long")
cdef long long _varint_size(long long value) noexcept

@cython.locals(sign="unsigned long long", rest="long long", byte="unsigned long long")
cdef Py_ssize_t _put_varint(unsigned char[::1] output, Py_ssize_t at, long long value) noexcept

@cython.locals(bit=Py_ssize_t)
cdef bint _is_null(Binary column, Py_ssize_t row) noexcept

@cython.locals(begin=Py_ssize_t, size=Py_ssize_t)
cdef long long _field_size(Binary column, Py_ssize_t row) except -1

@cython.locals(begin=Py_ssize_t, size=Py_ssize_t)
cdef Py_ssize_t _put_field(
    unsigned char[::1] output, Py_ssize_t at, Binary column, Py_ssize_t row
) except -1

@cython.locals(index=Py_ssize_t)
cdef Py_ssize_t _move(
    unsigned char[::1] output, Py_ssize_t at, const unsigned char[::1] data, Py_ssize_t begin, Py_ssize_t size
) except -1

cdef Py_ssize_t _move_slice(
    unsigned char[::1] output, Py_ssize_t at, const unsigned char[::1] data, Py_ssize_t begin, Py_ssize_t size
) except -1
