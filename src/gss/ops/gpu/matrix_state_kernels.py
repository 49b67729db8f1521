"""The kernels of `gss.ops.gpu.matrix_state`, whose docstring has the formulas.

In all of them, [.., D, 2, N] is a state as kernels pass it on, relative to a chunk's middle. Constants are the modes N
and values D of a head, the sizes of their tiles, the tokens C of a chunk, and the precision of products.
"""

import triton
import triton.language as tl

from gss.ops.gpu.powers import powers_of, times


@triton.jit
def powers_kernel(
    rate, table, segment, last, MODES: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr
):
    """The four powers: by a chunk, by a segment, from a state to the middle of the chunk after it, and from the middle
    of the last chunk, of `last` tokens, to its end.
    """
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BN)
    at = rate + head * MODES + n
    log_re = tl.load(at, mask=n < MODES, other=0.0).to(tl.float64)[None, :]
    log_im = tl.load(at + tl.num_programs(0) * MODES, mask=n < MODES, other=0.0).to(tl.float64)[None, :]
    whole = tl.where(row == C, C, segment)
    ends = tl.where(row == C + 2, C // 2 + 1, last - 1 - C // 2)
    exponent = tl.where(row < C, C // 2 - row, tl.where(row < C + 2, whole, ends)).to(tl.float64)[:, None]
    key_re, key_im = powers_of(log_re, log_im, exponent)
    # A query turns by the same angle as a key in its place, and shrinks where the key grows.
    query_re, query_im = powers_of(-log_re, log_im, tl.where((row < C)[:, None], exponent, 0.0))
    out = table + ((head * (C + 4) + row) * 4 * MODES)[:, None] + n[None, :]
    mask = (row < C + 4)[:, None] & (n < MODES)[None, :]
    tl.store(out, key_re, mask=mask)
    tl.store(out + MODES, key_im, mask=mask)
    tl.store(out + 2 * MODES, query_re, mask=mask)
    tl.store(out + 3 * MODES, query_im, mask=mask)


@triton.jit
def _rounded(x, KIND: tl.constexpr, PRODUCTS: tl.constexpr):
    """An operand of a product. `KIND` and `PRODUCTS` differ in the interpreter alone, which would cut bits off."""
    if KIND == PRODUCTS:
        return x.to(KIND)
    else:
        x = x.to(tl.float32)
        scaled = x * 65537.0
        return scaled - (scaled - x)  # its eight leading bits, to the nearest


@triton.jit
def _turns(table, head, i, n, QUERIES: tl.constexpr, MODES: tl.constexpr, C: tl.constexpr):
    """For each place of a chunk, [C, BN]."""
    at = table + ((head * (C + 4) + i) * 4 * MODES)[:, None] + n[None, :] + (2 * MODES if QUERIES else 0)
    mask = (n < MODES)[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + MODES, mask=mask, other=0.0)


@triton.jit
def _power(table, head, n, WHICH: tl.constexpr, BACK: tl.constexpr, MODES: tl.constexpr, C: tl.constexpr):
    """One of the four powers, [1, BN]; its conjugate on the way back."""
    at = table + (head * (C + 4) + C + WHICH) * 4 * MODES + n
    re = tl.load(at, mask=n < MODES, other=0.0)[None, :]
    im = tl.load(at + MODES, mask=n < MODES, other=0.0)[None, :]
    return re, (-im if BACK else im)


@triton.jit
def _row(x, first, stride):
    """Where a chunk's first token lies: the only offset that 32 bits may not hold."""
    return x + tl.cast(first, tl.int64) * stride


@triton.jit
def _load_turned(x, i, live, stride, n, cos, sin, MODES: tl.constexpr, KIND: tl.constexpr, PRODUCTS: tl.constexpr):
    """Queries or keys of a chunk, turned, real and imaginary parts [C, BN]."""
    at = x + (i[:, None] * stride + n[None, :])
    mask = live[:, None] & (n < MODES)[None, :]
    re = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    im = tl.load(at + MODES, mask=mask, other=0.0).to(tl.float32)
    re, im = times(re, im, cos, sin)
    return _rounded(re, KIND, PRODUCTS), _rounded(im, KIND, PRODUCTS)


@triton.jit
def _turned(
    x, table, head, i, live, stride, n, QUERIES: tl.constexpr, MODES: tl.constexpr, C: tl.constexpr,
    KIND: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    cos, sin = _turns(table, head, i, n, QUERIES, MODES, C)
    return _load_turned(x, i, live, stride, n, cos, sin, MODES, KIND, PRODUCTS)


@triton.jit
def _load_values(x, i, live, stride, d, VALUES: tl.constexpr, KIND: tl.constexpr, PRODUCTS: tl.constexpr):
    loaded = tl.load(x + (i[:, None] * stride + d[None, :]), mask=live[:, None] & (d < VALUES)[None, :], other=0.0)
    return _rounded(loaded, KIND, PRODUCTS)


@triton.jit
def _store_values(x, i, live, stride, d, out, VALUES: tl.constexpr):
    at = x + (i[:, None] * stride + d[None, :])
    tl.store(at, out.to(x.dtype.element_ty), mask=live[:, None] & (d < VALUES)[None, :])


@triton.jit
def _product(left, right, total):
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _joined(re, im, ROWS: tl.constexpr, BN: tl.constexpr):
    """Real and imaginary parts [ROWS, BN] side by side: one product of them all instead of two small ones."""
    return tl.reshape(tl.permute(tl.join(re, im), (0, 2, 1)), (ROWS, 2 * BN))


@triton.jit
def _parts(x, ROWS: tl.constexpr, BN: tl.constexpr):
    """The inverse of `_joined`."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, BN)), (0, 2, 1)))


@triton.jit
def _state_at(states, index, d, n, MODES: tl.constexpr, VALUES: tl.constexpr, WHOLE: tl.constexpr = False):
    """Where the real part of a state [.., D, 2, N] lies, `WHOLE` of one as layers keep it, [.., 2N, D], and which of
    it exists; imaginary parts are N further, or N·D.
    """
    place = n[None, :] * VALUES + d[:, None] if WHOLE else d[:, None] * (2 * MODES) + n[None, :]
    return states + index * (2 * VALUES * MODES) + place, (d < VALUES)[:, None] & (n < MODES)[None, :]


@triton.jit
def _load_state(at, mask, FURTHER: tl.constexpr):
    re = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return re, tl.load(at + FURTHER, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_joined(at, mask, MODES: tl.constexpr, PRODUCTS: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    """A state as an operand of products, [BD, 2·BN]."""
    re, im = _load_state(at, mask, MODES)
    return _joined(re.to(PRODUCTS), im.to(PRODUCTS), BD, BN)


@triton.jit
def _store_state(at, mask, re, im, FURTHER: tl.constexpr):
    kind = at.dtype.element_ty
    tl.store(at, re.to(kind), mask=mask)
    tl.store(at + FURTHER, im.to(kind), mask=mask)


@triton.jit
def pass_kernel(
    table, state, starts, heads, segments,
    MODES: tl.constexpr, VALUES: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """From what each segment adds, found one place further on in `starts`, to the states at their starts."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    n = tl.arange(0, BN)
    row = tl.program_id(2).to(tl.int64)
    batch, head = row // heads, row % heads
    re = tl.zeros((BD, BN), tl.float32)
    im = tl.zeros((BD, BN), tl.float32)
    if state is not None:
        at, mask = _state_at(state, row, d, n, MODES, VALUES, True)
        re, im = _load_state(at, mask, MODES * VALUES)
        if BACK:
            into_re, into_im = _power(table, head, n, 3, BACK, MODES, C)
        else:
            into_re, into_im = _power(table, head, n, 2, BACK, MODES, C)
        re, im = times(re, im, into_re, into_im)
    turn_re, turn_im = _power(table, head, n, 1, BACK, MODES, C)
    at, mask = _state_at(starts, batch * segments * heads + head, d, n, MODES, VALUES)
    _store_state(at, mask, re, im, MODES)
    for _ in range(1, segments):
        at += heads * 2 * VALUES * MODES
        added_re, added_im = _load_state(at, mask, MODES)
        re, im = times(re, im, turn_re, turn_im)
        re += added_re
        im += added_im
        _store_state(at, mask, re, im, MODES)


@triton.jit
def states_kernel(
    keys, values, table, starts, states, after,
    key_batch, key_row, key_head, value_batch, value_row, value_head, length, heads, segment, segments,
    MODES: tl.constexpr, VALUES: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    KIND: tl.constexpr, PRODUCTS: tl.constexpr, BACK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Along a segment: the state at every chunk's start, or, for `SUMS`, what the segment adds to the next one's."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    part = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    batch, head = row // heads, row % heads
    i, n = tl.arange(0, C), tl.arange(0, BN)
    keys += batch * key_batch + head * key_head
    values += batch * value_batch + head * value_head
    cos, sin = _turns(table, head, i, n, BACK, MODES, C)
    step_re, step_im = _power(table, head, n, 0, BACK, MODES, C)
    if BACK:
        out_re, out_im = _power(table, head, n, 2, BACK, MODES, C)
    else:
        out_re, out_im = _power(table, head, n, 3, BACK, MODES, C)
    chunks = tl.cdiv(length, C)
    re = tl.zeros((BD, BN), tl.float32)
    im = tl.zeros((BD, BN), tl.float32)
    if not SUMS:
        at, mask = _state_at(starts, (batch * segments + part) * heads + head, d, n, MODES, VALUES)
        re, im = _load_state(at, mask, MODES)
    for place in range(part * segment, tl.minimum((part + 1) * segment, chunks)):
        chunk = chunks - 1 - place if BACK else place
        if not SUMS:
            here, exists = _state_at(states, (batch * chunks + chunk) * heads + head, d, n, MODES, VALUES)
            _store_state(here, exists, re, im, MODES)
        first = chunk * C
        live = first + i < length
        key, value = _row(keys, first, key_row), _row(values, first, value_row)
        k_re, k_im = _load_turned(key, i, live, key_row, n, cos, sin, MODES, KIND, PRODUCTS)
        v = tl.trans(_load_values(value, i, live, value_row, d, VALUES, KIND, PRODUCTS))
        ends = place == chunks - 1
        re, im = times(
            _product(v, k_re, re), _product(v, k_im, im),
            tl.where(ends, out_re, step_re), tl.where(ends, out_im, step_im),
        )  # fmt: skip
    if SUMS:
        at, mask = _state_at(starts, (batch * segments + part + 1) * heads + head, d, n, MODES, VALUES)
        _store_state(at, mask, re, im, MODES)
    elif after is not None and part == segments - 1:
        at, mask = _state_at(after, row, d, n, MODES, VALUES, True)
        _store_state(at, mask, re, im, MODES * VALUES)


@triton.jit
def output_kernel(
    queries, keys, values, table, skip, states, y,
    query_batch, query_row, query_head, key_batch, key_row, key_head, value_batch, value_row, value_head, length,
    MODES: tl.constexpr, VALUES: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    KIND: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """The outputs of a chunk, from the state before it."""
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks, heads = tl.num_programs(0), tl.num_programs(1)
    i, n = tl.arange(0, C), tl.arange(0, BN)
    first = chunk * C
    live = first + i < length
    queries = _row(queries, first, query_row) + batch * query_batch + head * query_head
    keys = _row(keys, first, key_row) + batch * key_batch + head * key_head
    values = _row(values, first, value_row) + batch * value_batch + head * value_head
    y += ((batch * length + first) * heads + head) * VALUES
    through = 0.0 if skip is None else tl.load(skip + head).to(tl.float32)
    q_re, q_im = _turned(queries, table, head, i, live, query_row, n, True, MODES, C, KIND, PRODUCTS)
    k_re, k_im = _turned(keys, table, head, i, live, key_row, n, False, MODES, C, KIND, PRODUCTS)
    q, k = _joined(q_re, q_im, C, BN), _joined(k_re, k_im, C, BN)
    scores = _product(q, tl.trans(k), tl.zeros((C, C), tl.float32))
    scores = _rounded(tl.where(i[:, None] >= i[None, :], scores, 0.0), KIND, PRODUCTS)
    for tile in range(0, VALUES, BD):
        d = tile + tl.arange(0, BD)
        v = _load_values(values, i, live, value_row, d, VALUES, KIND, PRODUCTS)
        at, mask = _state_at(states, (batch * chunks + chunk) * heads + head, d, n, MODES, VALUES)
        before = _load_joined(at, mask, MODES, PRODUCTS, BD, BN)
        out = _product(q, tl.trans(before), v.to(tl.float32) * through)
        out = _product(scores, v, out)
        _store_values(y, i, live, heads * VALUES, d, out, VALUES)


@triton.jit
def _store_turned_back(
    x, table, live, heads, head, i, n, re, im, QUERIES: tl.constexpr, MODES: tl.constexpr, C: tl.constexpr
):
    """A gradient with respect to turned queries or keys, as one with respect to themselves, in [.., h, 2N]."""
    cos, sin = _turns(table, head, i, n, QUERIES, MODES, C)  # loaded again: registers are scarcer
    re, im = times(re, im, cos, -sin)
    at = x + (i[:, None] * (heads * 2 * MODES) + n[None, :])
    mask = live[:, None] & (n < MODES)[None, :]
    tl.store(at, re.to(x.dtype.element_ty), mask=mask)
    tl.store(at + MODES, im.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _conjugate_sum(a_re, a_im, b_re, b_im):
    """Σ a*·b over rows, real and imaginary part."""
    a_re, a_im, b_re, b_im = a_re.to(tl.float32), a_im.to(tl.float32), b_re.to(tl.float32), b_im.to(tl.float32)
    return tl.sum(a_re * b_re + a_im * b_im, 0), tl.sum(a_re * b_im - a_im * b_re, 0)


@triton.jit
def gradient_kernel(
    queries, keys, values, grad, table, skip, states, ahead, by_queries, by_keys, by_values, partial,
    query_batch, query_row, query_head, key_batch, key_row, key_head, value_batch, value_row, value_head,
    grad_batch, grad_row, grad_head, length,
    MODES: tl.constexpr, VALUES: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    KIND: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """All gradients of a chunk, from the state before it and the gradient of its own bracket (R above), in `ahead`."""
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, n = tl.arange(0, C), tl.arange(0, BN)
    first = chunk * C
    live = first + i < length
    chunks, heads = tl.num_programs(0), tl.num_programs(1)
    values = _row(values, first, value_row) + batch * value_batch + head * value_head
    grad = _row(grad, first, grad_row) + batch * grad_batch + head * grad_head
    place = (batch * length + first) * heads + head
    by_values += place * VALUES
    queries = _row(queries, first, query_row) + batch * query_batch + head * query_head
    keys = _row(keys, first, key_row) + batch * key_batch + head * key_head
    q_re, q_im = _turned(queries, table, head, i, live, query_row, n, True, MODES, C, KIND, PRODUCTS)
    k_re, k_im = _turned(keys, table, head, i, live, key_row, n, False, MODES, C, KIND, PRODUCTS)
    through = 0.0 if skip is None else tl.load(skip + head).to(tl.float32)
    q, k = _joined(q_re, q_im, C, BN), _joined(k_re, k_im, C, BN)
    # Transposed, as the values' gradient wants them.
    scores = _product(k, tl.trans(q), tl.zeros((C, C), tl.float32))
    scores = _rounded(tl.where(i[:, None] <= i[None, :], scores, 0.0), KIND, PRODUCTS)
    here = (batch * chunks + chunk) * heads + head
    # One gradient after the other: what they share is found in the cache again, registers are scarcer.
    by_scores = tl.zeros((C, C), tl.float32)
    for tile in range(0, VALUES, BD):
        d = tile + tl.arange(0, BD)
        v = _load_values(values, i, live, value_row, d, VALUES, KIND, PRODUCTS)
        g = _load_values(grad, i, live, grad_row, d, VALUES, KIND, PRODUCTS)
        by_scores = _product(g, tl.trans(v), by_scores)
        at, mask = _state_at(ahead, here, d, n, MODES, VALUES)
        r = _load_joined(at, mask, MODES, PRODUCTS, BD, BN)
        gv = _product(scores, g, g.to(tl.float32) * through)
        gv = _product(k, tl.trans(r), gv)
        _store_values(by_values, i, live, heads * VALUES, d, gv, VALUES)
    by_scores = tl.where(i[:, None] >= i[None, :], by_scores, 0.0)
    distance = (i[:, None] - i[None, :]).to(tl.float32)
    partial += here * (2 * MODES + 1)
    tl.store(partial + 2 * MODES, tl.sum(tl.sum(tl.where(distance == 0, by_scores, 0.0), 1), 0))
    far = _rounded(by_scores * distance, KIND, PRODUCTS)
    by_scores = _rounded(by_scores, KIND, PRODUCTS)
    gq = tl.zeros((C, 2 * BN), tl.float32)
    for tile in range(0, VALUES, BD):
        d = tile + tl.arange(0, BD)
        g = _load_values(grad, i, live, grad_row, d, VALUES, KIND, PRODUCTS)
        at, mask = _state_at(states, here, d, n, MODES, VALUES)
        gq = _product(g, _load_joined(at, mask, MODES, PRODUCTS, BD, BN), gq)
    far_re, far_im = _parts(_product(far, k, gq * (i + 1).to(tl.float32)[:, None]), C, BN)
    # Again: they need not wait in registers.
    q_re, q_im = _turned(queries, table, head, i, live, query_row, n, True, MODES, C, KIND, PRODUCTS)
    rate_re, rate_im = _conjugate_sum(q_re, q_im, far_re, far_im)
    gq_re, gq_im = _parts(_product(by_scores, k, gq), C, BN)
    by_queries, by_keys = by_queries + place * (2 * MODES), by_keys + place * (2 * MODES)
    _store_turned_back(by_queries, table, live, heads, head, i, n, gq_re, gq_im, True, MODES, C)
    gk = tl.zeros((C, 2 * BN), tl.float32)
    past_re, past_im = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for tile in range(0, VALUES, BD):
        d = tile + tl.arange(0, BD)
        v = _load_values(values, i, live, value_row, d, VALUES, KIND, PRODUCTS)
        at, mask = _state_at(states, here, d, n, MODES, VALUES)
        s_re, s_im = _load_state(at, mask, MODES)
        at, mask = _state_at(ahead, here, d, n, MODES, VALUES)
        r_re, r_im = _load_state(at, mask, MODES)
        across_re, across_im = _conjugate_sum(r_re, r_im, s_re, s_im)
        past_re += across_re
        past_im += across_im
        gk = _product(v, _joined(r_re.to(PRODUCTS), r_im.to(PRODUCTS), BD, BN), gk)
    size = tl.minimum(C, length - chunk * C)
    gone_re, gone_im = _parts(gk * (size - 1 - i).to(tl.float32)[:, None], C, BN)
    k_re, k_im = _turned(keys, table, head, i, live, key_row, n, False, MODES, C, KIND, PRODUCTS)
    out_re, out_im = _conjugate_sum(gone_re, gone_im, k_re, k_im)
    tl.store(partial + n, rate_re + out_re + size * past_re, mask=n < MODES)
    tl.store(partial + MODES + n, -(rate_im + out_im + size * past_im), mask=n < MODES)
    gk_re, gk_im = _parts(_product(tl.trans(by_scores), q, gk), C, BN)
    _store_turned_back(by_keys, table, live, heads, head, i, n, gk_re, gk_im, False, MODES, C)
