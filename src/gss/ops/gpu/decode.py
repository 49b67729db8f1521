"""One token of one sequence through a GSS model: matrix–vector products at the speed of memory.

The fast path of `gss.nn.gss` and `gss.nn.decode_plans` for a single row; `decode_batch` has the one for several. The
sizes of the 192M preset in bytes: a layer's weights are 8.9 MB (gate and inner, stacked), 2.1 MB (context) and 8.4 MB
(output), the head is 65.5 MB; 376 MB in all, 90 µs at 4.2 TB/s. Nothing else is of that order, so that is the floor.

What keeps a kernel from that floor is latency: a product with 2 µs worth of bytes waits for the previous one, starts,
loads and reduces. Each kernel here therefore loads its weights, which depend on nothing, *before* it waits for the
previous kernel (`ready`, programmatic dependent launch). Each program holds a tile of some 16 KB in registers; only the
small vectors are loaded after the wait. (Prefetching the weights of later kernels into the cache gains nothing: the
1.2 µs that a kernel takes beyond its bytes are the chain from one to the next.) Three kernels per layer:

1. `gate_inner_one`: norm, then [gate; inner] with bias and activation. Other programs of the same launch compute what
   earlier tokens contribute to this token's output of the state space (`earlier_outputs`), which is independent.
2. `context_one`: inner norm, the state space's output, context product, times the gate.
3. `output_one`: output product, added to the residual stream.

A Transformer block uses the first of these without a state space, the two kernels of attention (`decode_mixers`), the
first again, and the last. At the end come `head_one` (norm, logits, the maximum of each tile) and `choose_next`. Sums,
norms, the residual stream and the state are float32; only the weights are bfloat16.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def ready(OVERLAP: tl.constexpr):
    """Let the next kernel start to load its weights, and wait until every kernel before has written its results."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The config's activation of float32 values, or none."""
    if ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "swish":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "none", "an activation that the kernels do not have")
        y = x
    return y


@triton.jit
def normed(x, inside, scale, shift, epsilon, SIZE: tl.constexpr, CENTRED: tl.constexpr):
    """The norm of a vector whose places outside the mask are 0: layer norm if CENTRED, else by the root mean square."""
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / SIZE, 0.0)
    return x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon) * scale + shift


@triton.jit
def normed_product(
    x_at, scale_at, shift_at, weight_at, bias_at, row, rows, epsilon,
    E: tl.constexpr, CENTRED: tl.constexpr, E_PAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """W norm(x) + b for these of the weight's rows, loaded before the wait for the kernel before."""
    k = tl.arange(0, E_PAD)
    inside = (row[:, None] < rows) & (k[None, :] < E)
    weight = tl.load(weight_at + row[:, None] * E + k[None, :], mask=inside, other=0.0)
    scale = tl.load(scale_at + k, mask=k < E, other=0.0)
    shift = tl.load(shift_at + k, mask=k < E, other=0.0)
    bias = tl.load(bias_at + row, mask=row < rows, other=0.0)
    ready(OVERLAP)
    x = tl.load(x_at + k, mask=k < E, other=0.0)
    x = normed(x, k < E, scale, shift, epsilon, E, CENTRED)
    return tl.sum(weight.to(tl.float32) * x[None, :], 1) + bias


@triton.jit
def earlier_outputs(
    tile, inputs_at, taps_at, carried_at, base_at, read, rows,
    H: tl.constexpr, W_PAD: tl.constexpr, ROWS: tl.constexpr, DRAFT: tl.constexpr = 0,
):  # fmt: skip
    """y of this token but for its own input: what the block's starting state gives, and the block's earlier inputs.

    Inputs and what the state adds are [W, B·H], taps [W, H]; `base` [B·H] is written. In a DRAFT, of a block of that
    many tokens, rows are B successive tokens of one sequence and `read` is the place of the first.
    """
    row = tile * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, W_PAD)
    inside = (place[:, None] < read) & (row[None, :] < rows)
    known = row < rows
    if DRAFT:
        known &= read + row // H < DRAFT
        inside &= known[None, :]
        held = tl.load(inputs_at + place[:, None] * H + (row % H)[None, :], mask=inside, other=0.0)
        taps = tl.load(taps_at + (read - place)[:, None] * H + row[None, :], mask=inside, other=0.0)
        carried = tl.load(carried_at + read * H + row, mask=known, other=0.0)
    else:
        held = tl.load(inputs_at + place[:, None] * rows + row[None, :], mask=inside, other=0.0)
        taps = tl.load(taps_at + (read - place)[:, None] * H + (row % H)[None, :], mask=inside, other=0.0)
        carried = tl.load(carried_at + read * rows + row, mask=known, other=0.0)
    tl.store(base_at + row, carried + tl.sum(held * taps, 0), mask=row < rows)


@triton.jit
def embed_rows(
    tokens_at, counters_at, read_at, embedding_at, wavenumber_at, x_at,
    V, E: tl.constexpr, COUNTERS: tl.constexpr, SINUSOIDS: tl.constexpr, E_PAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x [B, E] for the next tokens, a program per row; moves counters [COUNTERS, B] and the place in the block on.

    The first counter is the position.

    A token outside the vocabulary gives NaN, which reaches the logits, instead of a read outside the table.
    """
    row = tl.program_id(0)
    k = tl.arange(0, E_PAD)
    ready(OVERLAP)
    token = tl.load(tokens_at + row)
    known = (token >= 0) & (token < V)
    x = tl.load(embedding_at + token * E + k, mask=known & (k < E), other=float("nan")).to(tl.float32)
    position = tl.load(counters_at + row)
    if SINUSOIDS:
        half: tl.constexpr = E // 2
        turns = position.to(tl.float64) * tl.load(wavenumber_at + k % half)  # angles ÷ 2π
        angle = ((turns - tl.floor(turns)) * 6.283185307179586).to(tl.float32)
        x += tl.where(k < half, tl.sin(angle), tl.cos(angle)).to(embedding_at.dtype.element_ty)
    tl.store(x_at + row * E + k, x, mask=k < E)
    tl.debug_barrier()  # every warp has read the position
    for counter in tl.static_range(COUNTERS):
        counter_at = counters_at + counter * tl.num_programs(0) + row
        tl.store(counter_at, tl.load(counter_at) + 1)
    if row == 0:
        tl.store(read_at, tl.load(read_at) + 1)


@triton.jit
def gate_inner_one(
    x_at, scale_at, shift_at, weight_at, bias_at, gate_at, inner_at,
    inputs_at, taps_at, carried_at, base_at, read_at, epsilon,
    E: tl.constexpr, F: tl.constexpr, H: tl.constexpr, CENTRED: tl.constexpr, ACTIVATION: tl.constexpr,
    E_PAD: tl.constexpr, W_PAD: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """v = φ(W₂ norm(x) + b₂) [F] and φ(W₁ norm(x) + b₁) [H]; the programs beyond their tiles do `earlier_outputs`.

    With H = 0 a product as a Transformer block has it, which has no such programs.
    """
    tile = tl.program_id(0)
    tiles: tl.constexpr = (F + H + ROWS - 1) // ROWS
    if tile < tiles:
        row = tile * ROWS + tl.arange(0, ROWS)
        y = normed_product(
            x_at, scale_at, shift_at, weight_at, bias_at, row, F + H, epsilon, E, CENTRED, E_PAD, OVERLAP
        )
        y = activated(y, ACTIVATION)
        tl.store(gate_at + row, y.to(gate_at.dtype.element_ty), mask=row < F)
        tl.store(inner_at + row - F, y, mask=(row >= F) & (row < F + H))
    elif H > 0:
        ready(OVERLAP)
        read = tl.load(read_at)
        earlier_outputs(tile - tiles, inputs_at, taps_at, carried_at, base_at, read, H, H, W_PAD, CHANNELS)


@triton.jit
def context_one(
    inner_at, scale_at, shift_at, base_at, taps_at, inputs_at, read_at, weight_at, bias_at, gate_at, gated_at, epsilon,
    F: tl.constexpr, H: tl.constexpr, CENTRED: tl.constexpr,
    H_PAD: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """(W₃ y + b₃) ∗ v [F], where y = base + K₀ ∗ u for u = norm(inner), which joins the block's inputs."""
    tile = tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, H_PAD)
    inside = (row[:, None] < F) & (h[None, :] < H)
    weight = tl.load(weight_at + row[:, None] * H + h[None, :], mask=inside, other=0.0)
    scale = tl.load(scale_at + h, mask=h < H, other=0.0)
    shift = tl.load(shift_at + h, mask=h < H, other=0.0)
    first_tap = tl.load(taps_at + h, mask=h < H, other=0.0)
    bias = tl.load(bias_at + row, mask=row < F, other=0.0)
    ready(OVERLAP)
    inner = tl.load(inner_at + h, mask=h < H, other=0.0)
    base = tl.load(base_at + h, mask=h < H, other=0.0)
    gate = tl.load(gate_at + row, mask=row < F, other=0.0).to(tl.float32)
    u = normed(inner, h < H, scale, shift, epsilon, H, CENTRED)
    y = base + first_tap * u
    context = tl.sum(weight.to(tl.float32) * y[None, :], 1) + bias
    tl.store(gated_at + row, (context * gate).to(gated_at.dtype.element_ty), mask=row < F)
    if tile == 0:
        tl.store(inputs_at + tl.load(read_at) * H + h, u, mask=h < H)


@triton.jit
def output_one(
    gated_at, weight_at, bias_at, x_at,
    E: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x += W₄ gated + b₄, in place; a program reads whole rows of the weight, COLUMNS at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    places = row[:, None] * F + k[None, :]
    weight = tl.load(weight_at + places, mask=(row[:, None] < E) & (k[None, :] < F), other=0.0)
    bias = tl.load(bias_at + row, mask=row < E, other=0.0)
    ready(OVERLAP)
    x = tl.load(x_at + row, mask=row < E, other=0.0)
    gated = tl.load(gated_at + k, mask=k < F, other=0.0).to(tl.float32)
    total = tl.sum(weight.to(tl.float32) * gated[None, :], 1)
    for start in range(COLUMNS, F, COLUMNS):
        inside = start + k < F
        weight = tl.load(weight_at + places + start, mask=(row[:, None] < E) & inside[None, :], other=0.0)
        gated = tl.load(gated_at + start + k, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(weight.to(tl.float32) * gated[None, :], 1)
    tl.store(x_at + row, x + total + bias, mask=row < E)


@triton.jit
def shown(logits):
    """NaN as infinity, so that the largest shows it."""
    return tl.where(logits == logits, logits, float("inf"))


@triton.jit
def head_one(
    x_at, scale_at, shift_at, weight_at, logits_at, best_at, best_token_at, epsilon, factor,
    V, E: tl.constexpr, CENTRED: tl.constexpr, E_PAD: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Logits [V] of factor·norm(x), and the largest of every tile of ROWS tokens with its token."""
    tile = tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, E_PAD)
    inside = (row[:, None] < V) & (k[None, :] < E)
    weight = tl.load(weight_at + row.to(tl.int64)[:, None] * E + k[None, :], mask=inside, other=0.0)
    scale = tl.load(scale_at + k, mask=k < E, other=0.0)
    shift = tl.load(shift_at + k, mask=k < E, other=0.0)
    ready(OVERLAP)
    x = tl.load(x_at + k, mask=k < E, other=0.0)
    x = normed(x, k < E, scale, shift, epsilon, E, CENTRED) * factor
    logits = tl.sum(weight.to(tl.float32) * x[None, :], 1)
    tl.store(logits_at + row, logits, mask=row < V)
    logits = shown(tl.where(row < V, logits, float("-inf")))
    best, place = tl.max(logits, 0, return_indices=True)
    tl.store(best_at + tile, best)
    tl.store(best_token_at + tile, tile * ROWS + place)


@triton.jit
def choose_next(
    best_at, best_token_at, tokens_at, out_at, tiles,
    TILES_PAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The likeliest token of each row (a program), from the tiles' [B, tiles]; the lowest id where several tie.

    −1 where the logits were not finite: what is read after it is not either.
    """
    row = tl.program_id(0)
    tile = tl.arange(0, TILES_PAD)
    ready(OVERLAP)
    best = tl.load(best_at + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    token = tl.load(best_token_at + row * tiles + tl.argmax(best, 0)).to(tl.int64)
    token = tl.where(tl.max(best, 0) < float("inf"), token, -1)
    tl.store(tokens_at + row, token)
    tl.store(out_at + row, token)


@triton.jit
def find_draft(
    tokens_at, history_at, length_at, given_at, B, B_PAD: tl.constexpr, SPAN: tl.constexpr, OVERLAP: tl.constexpr
):
    """B tokens [B] to give to one sequence: its next, and what followed when its last three tokens came before.

    That is `gss.decode.lookup` in a history that ends with the next token; −2 where there is nothing.
    """
    ready(OVERLAP)
    length = tl.load(length_at).to(tl.int32)
    known = length > 3
    first = tl.load(history_at + length - 3, mask=known, other=0)
    second = tl.load(history_at + length - 2, mask=known, other=0)
    third = tl.load(history_at + length - 1, mask=known, other=0)
    last = length - 1  # the place after the three tokens, at most
    start = tl.full((), 0, tl.int32)
    while (last >= 3) & (start == 0):
        place = last - tl.arange(0, SPAN)
        there = place >= 3
        same = tl.load(history_at + place - 3, mask=there, other=-1) == first
        same &= tl.load(history_at + place - 2, mask=there, other=-1) == second
        same &= tl.load(history_at + place - 1, mask=there, other=-1) == third
        start = tl.max(tl.where(same & there, place, 0), 0)
        last -= SPAN
    column = tl.arange(0, B_PAD)
    drafted = (start > 0) & (column > 0)
    place = start + (column - 1) % (length - start)  # what repeats itself goes on doing so
    token = tl.load(history_at + place, mask=drafted, other=-2)
    token = tl.where(column == 0, tl.load(tokens_at), token)
    tl.store(given_at + column, token, mask=column < B)


@triton.jit
def accept_draft(
    given_at, drawn_at, tokens_at, counters_at, read_at, history_at, length_at,
    B, W, COUNTERS: tl.constexpr, B_PAD: tl.constexpr, COUNTERS_PAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """How many of B tokens that one sequence was given [B] it goes on from: the first, and those drawn [B] before them.

    A token is taken back, too, where nothing could be drawn after it, or the block of W ends before it: all of them if
    the block was full. What was drawn last is the next token; the counters and the place in the block, until now those
    of the first token, follow, and the history. −2 replaces what was drawn beyond.
    """
    column = tl.arange(0, B_PAD)
    counter = tl.arange(0, COUNTERS_PAD)
    ready(OVERLAP)
    given = tl.load(given_at + column, mask=column < B, other=-2)
    before = tl.load(drawn_at + column - 1, mask=(column > 0) & (column < B), other=-1)
    drawn = tl.load(drawn_at + column, mask=column < B, other=-1)
    kept = (column == 0) | ((given == before) & (drawn >= 0))
    place = tl.load(read_at)
    count = tl.minimum(tl.min(tl.where(kept, B_PAD, column), 0), W - place)
    tl.store(tokens_at, tl.sum(tl.where(column == count - 1, drawn, 0), 0), mask=count > 0)
    tl.store(drawn_at + column, tl.where(column < count, drawn, -2), mask=column < B)
    read = tl.load(counters_at + counter, mask=counter < COUNTERS, other=0)
    tl.store(counters_at + counter, read + count, mask=counter < COUNTERS)
    tl.store(read_at, place + count - 1)
    length = tl.load(length_at)
    tl.store(history_at + length + column, drawn, mask=column < count)
    tl.store(length_at, length + count)
