// Whole layers of a decode step, one call each, for a few tokens. Compiled on first use by `gss.ops.cpu`, for the
// machine that it runs on; the plans of `gss.nn.cpu_plans` call it, and leave what it does not know to PyTorch.
//
// A step is of `length` tokens of each of `batch` rows; x and y are [batch, length, width].
#include "products.h"

void gss_product(const struct matrix *matrix, int64_t rows, const float *x, float *y) {
    multiply((struct product){.matrix = matrix, .rows = rows, .x = x, .y = y});
}

// Further tokens of a state space that is within a block (see `gss.nn.decode_plans.BlockedStateSpace`): u and y
// [batch, length, channels], inputs [batch, channels, size], reversed taps [channels, size], carried
// [batch, size, channels]; `read` tokens of the block came before.
void gss_blocked_steps(int64_t batch, int64_t length, int64_t channels, int64_t size, int64_t read, const float *u,
                       float *inputs, const float *taps, const float *carried, float *y) {
    for (int64_t b = 0; b < batch; b++)
        for (int64_t c = 0; c < channels; c++) {
            float *own = inputs + (b * channels + c) * size;
            for (int64_t t = 0; t < length; t++) {
                int64_t at = (b * length + t) * channels + c, seen = read + t + 1;
                own[seen - 1] = u[at];
                y[at] = dot(own, taps + c * size + size - seen, seen) + carried[(b * size + seen - 1) * channels + c];
            }
        }
}

// GSS: (DSS(norm(φ(XW₁)))·W₃ ∗ φ(XW₂))·W₄ + X, with X normed first.
struct gss {
    struct norm norm, inner_norm;
    struct matrix inner, gate, context, output;
    int64_t phi, size;  // of a block
    const float *taps;
};

void gss_layer(const struct gss *l, int64_t batch, int64_t length, int64_t read, float *inputs, const float *carried,
               const float *x, float *y) {
    int64_t rows = batch * length, width = l->inner.inputs, channels = l->inner.outputs, wide = l->gate.outputs;
    float *normed = malloc(rows * (width + 3 * channels + 2 * wide) * sizeof(float));
    float *u = normed + rows * width, *v = u + rows * channels, *mixed = v + rows * channels;
    float *gate = mixed + rows * channels, *gated = gate + rows * wide;
    normalize(&l->norm, rows, width, x, normed);
    multiply((struct product){.matrix = &l->inner, .rows = rows, .x = normed, .y = u, .activation = l->phi});
    normalize(&l->inner_norm, rows, channels, u, v);
    gss_blocked_steps(batch, length, channels, l->size, read, v, inputs, l->taps, carried, mixed);
    multiply((struct product){.matrix = &l->gate, .rows = rows, .x = normed, .y = gate, .activation = l->phi});
    multiply((struct product){.matrix = &l->context, .rows = rows, .x = mixed, .y = gated, .times = gate});
    multiply((struct product){.matrix = &l->output, .rows = rows, .x = gated, .y = y, .plus = x});
    free(normed);
}

// x + φ(norm(x)·W₁)·W₃; where there is a W₂, x + (φ(norm(x)·W₁) ∗ norm(x)·W₂)·W₃.
struct feedforward {
    struct norm norm;
    struct matrix inner, gated, outer;
    int64_t phi;
};

static void feed_forward(const struct feedforward *f, int64_t rows, const float *x, float *y) {
    int64_t width = f->inner.inputs, wide = f->inner.outputs;
    float *normed = malloc(rows * (width + 2 * wide) * sizeof(float)), *hidden = normed + rows * width;
    float *last = hidden;
    normalize(&f->norm, rows, width, x, normed);
    multiply((struct product){.matrix = &f->inner, .rows = rows, .x = normed, .y = hidden, .activation = f->phi});
    if (f->gated.values) {
        last = hidden + rows * wide;
        multiply((struct product){.matrix = &f->gated, .rows = rows, .x = normed, .y = last, .times = hidden});
    }
    multiply((struct product){.matrix = &f->outer, .rows = rows, .x = last, .y = y, .plus = x});
    free(normed);
}

// GSS2: x + (norm(y) ∗ swish(norm(x)·W_z))·W_o, then a feed-forward; y is the matrix state's of q, k and v.
struct gss2 {
    struct norm norm;
    struct matrix query, key, value, gate, output;
    struct feedforward feedforward;
    int64_t heads, modes, values, taps, feature_map;
    const float *short_taps;    // [taps, queries + keys + values], the newest token's first
    const float *factor;        // [2, heads, modes]: e^λ
    const float *energy, *skip; // [heads, 2 · modes], [heads]
    const float *output_scale;  // [heads · values]
};

// The factor that makes a vector's mean square 1.
INLINE float rms_factor(const float *x, int64_t size) { return 1 / sqrtf(dot(x, x, size) / size + 1e-6f); }

// One head's token: S = e^λ ∗ S + k vᵀ, y = qᵀS + skip·v, y normed; S is [2 · modes, values], real parts first.
static void keyed_step(const struct gss2 *l, int64_t head, float *q, float *k, const float *v, const float *before,
                       float *state, float *y) {
    int64_t modes = l->modes, values = l->values;
    const float *cosine = l->factor + head * modes, *sine = cosine + l->heads * modes;
    float q_factor = rms_factor(q, 2 * modes) / sqrtf(2 * modes), k_factor = rms_factor(k, 2 * modes);
    for (int64_t n = 0; n < 2 * modes; n++) q[n] *= q_factor, k[n] *= k_factor * l->energy[head * 2 * modes + n];
    for (int64_t d = 0; d < values; d += LANES) {
        floats value = load(v + d), total = value * l->skip[head];
        for (int64_t n = 0; n < modes; n++) {
            int64_t at = n * values + d, below = at + modes * values;
            floats real = load(before + at), imaginary = load(before + below);
            floats next = real * cosine[n] - imaginary * sine[n] + value * k[n];
            floats turned = real * sine[n] + imaginary * cosine[n] + value * k[modes + n];
            memcpy(state + at, &next, sizeof next);
            memcpy(state + below, &turned, sizeof turned);
            total += next * q[n] + turned * q[modes + n];
        }
        memcpy(y + d, &total, sizeof total);
    }
    float factor = rms_factor(y, values);
    for (int64_t d = 0; d < values; d++) y[d] *= factor * l->output_scale[head * values + d];
}

// Tokens leave a state each, so that the last ones can be taken back: the first in `states` [batch, heads, 2 · modes,
// values], those of a row alone further on in `ahead`, and `at` is the one to start from. `recent` [batch, taps + 7,
// channels] has the inputs of the short convolution likewise: those of the last step's token `at` are followed by ours.
void gss2_layer(const struct gss2 *l, int64_t batch, int64_t length, int64_t at, float *states, float *ahead,
                float *recent, const float *x, float *y) {
    int64_t rows = batch * length, width = l->query.inputs, keys = l->query.outputs, inner = l->value.outputs;
    int64_t channels = 2 * keys + inner, size = l->heads * 2 * l->modes * l->values, before = l->taps - 1;
    float *normed = malloc(rows * 2 * (width + channels + inner) * sizeof(float)), *between = normed + rows * width;
    float *projected = between + rows * width, *convolved = projected + rows * channels;
    float *mixed = convolved + rows * channels, *gated = mixed + rows * inner;
    normalize(&l->norm, rows, width, x, normed);
    multiply((struct product){.matrix = &l->query, .rows = rows, .x = normed, .y = projected});
    multiply((struct product){.matrix = &l->key, .rows = rows, .x = normed, .y = projected + rows * keys});
    multiply((struct product){.matrix = &l->value, .rows = rows, .x = normed, .y = projected + 2 * rows * keys});
    for (int64_t b = 0; b < batch; b++) {
        float *inputs = recent + b * (before + MOST_ROWS) * channels;
        memmove(inputs, inputs + (at + 1) * channels, before * channels * sizeof(float));
        for (int64_t t = 0; t < length; t++) {
            float *input = inputs + (before + t) * channels, *to = convolved + (b * length + t) * channels;
            int64_t row = b * length + t;
            memcpy(input, projected + row * keys, keys * sizeof(float));
            memcpy(input + keys, projected + (rows + row) * keys, keys * sizeof(float));
            memcpy(input + 2 * keys, projected + 2 * rows * keys + row * inner, inner * sizeof(float));
            for (int64_t c = 0; c < channels; c += LANES) {
                floats total = load(input + c) * load(l->short_taps + c);
                for (int64_t k = 1; k <= before; k++)
                    total += load(input + c - k * channels) * load(l->short_taps + k * channels + c);
                total = c < 2 * keys ? activated(l->feature_map, total) : swish(total);
                memcpy(to + c, &total, sizeof total);
            }
        }
    }
#pragma omp parallel for schedule(static)
    for (int64_t each = 0; each < batch * l->heads; each++) {
        int64_t b = each / l->heads, head = each % l->heads, own = head * 2 * l->modes * l->values;
        for (int64_t t = 0; t < length; t++) {
            int64_t row = b * length + t, from = t ? t - 1 : at;
            float *first = states + b * size, *q = convolved + row * channels + head * 2 * l->modes;
            keyed_step(l, head, q, q + keys, convolved + row * channels + 2 * keys + head * l->values,
                       (from ? ahead + (from - 1) * size : first) + own, (t ? ahead + (t - 1) * size : first) + own,
                       mixed + row * inner + head * l->values);
        }
    }
    multiply((struct product){
        .matrix = &l->gate, .rows = rows, .x = normed, .y = gated, .activation = SWISH, .times = mixed});
    multiply((struct product){.matrix = &l->output, .rows = rows, .x = gated, .y = between, .plus = x});
    feed_forward(&l->feedforward, rows, between, y);
    free(normed);
}

// A Transformer block: x + attention(norm x), then a feed-forward.
struct transformer {
    struct norm norm;
    struct matrix query_key_value, output;
    struct feedforward feedforward;
    int64_t heads, reach, chunked;  // the tokens that one sees, or that a chunk has
    const double *frequency;        // [width of a head / 2]: radians per token of rotary positions, or NULL
};

// Keys and values of a row, [heads, room, width of a head]: that of position p is in slot p % room.
struct cache {
    float *keys, *values;
    int64_t room, position;
};

static void rotate(const double *frequency, int64_t position, int64_t heads, int64_t width, float *x) {
    for (int64_t i = 0; i < width / 2; i++) {
        float cosine = (float)cos(position * frequency[i]), sine = (float)sin(position * frequency[i]);
        for (float *pair = x + i; pair < x + heads * width; pair += width) {
            float first = pair[0], second = pair[width / 2];
            pair[0] = first * cosine - second * sine;
            pair[width / 2] = first * sine + second * cosine;
        }
    }
}

// What a head's query sees of the positions from `first` to `last`.
static void attend(const float *query, const float *keys, const float *values, int64_t room, int64_t width,
                   int64_t first, int64_t last, float *y) {
    int64_t count = last - first + 1, slot = first % room;
    float *weight = malloc(((count + LANES - 1) / LANES * LANES) * sizeof(float)), most = -INFINITY, total = 0;
    for (int64_t i = 0, s = slot; i < count; i++, s = s + 1 == room ? 0 : s + 1) {
        weight[i] = dot(query, keys + s * width, width) / sqrtf(width);
        most = weight[i] > most ? weight[i] : most;
    }
    for (int64_t i = 0; i < count; i += LANES) {
        floats value = exponential(load(weight + i) - most);
        memcpy(weight + i, &value, sizeof value);
    }
    for (int64_t i = 0; i < count; i++) total += weight[i];
    for (int64_t d = 0; d < width; d += 4 * LANES) {
        floats sums[4] = {0};
        int parts = width - d < 4 * LANES ? (width - d) / LANES : 4;
        for (int64_t i = 0, s = slot; i < count; i++, s = s + 1 == room ? 0 : s + 1)
            for (int part = 0; part < parts; part++)
                sums[part] += load(values + s * width + d + part * LANES) * weight[i];
        for (int part = 0; part < parts; part++) {
            sums[part] /= total;
            memcpy(y + d + part * LANES, &sums[part], sizeof *sums);
        }
    }
    free(weight);
}

void gss_transformer(const struct transformer *l, int64_t batch, int64_t length, const struct cache *caches,
                     const float *x, float *y) {
    int64_t rows = batch * length, inner = l->output.inputs, width = l->query_key_value.inputs, each = inner / l->heads;
    float *normed = malloc(rows * (width + 4 * inner + width) * sizeof(float)), *projected = normed + rows * width;
    float *attended = projected + rows * 3 * inner, *between = attended + rows * inner;
    normalize(&l->norm, rows, width, x, normed);
    multiply((struct product){.matrix = &l->query_key_value, .rows = rows, .x = normed, .y = projected});
    for (int64_t row = 0; row < rows; row++) {
        const struct cache *c = caches + row / length;
        int64_t position = c->position + row % length, slot = position % c->room;
        float *queries = projected + row * 3 * inner;
        if (l->frequency) rotate(l->frequency, position, 2 * l->heads, each, queries);
        for (int64_t head = 0; head < l->heads; head++) {
            memcpy(c->keys + (head * c->room + slot) * each, queries + inner + head * each, each * sizeof(float));
            memcpy(c->values + (head * c->room + slot) * each, queries + 2 * inner + head * each, each * sizeof(float));
        }
    }
#pragma omp parallel for schedule(static)
    for (int64_t one = 0; one < rows * l->heads; one++) {
        int64_t row = one / l->heads, head = one % l->heads;
        const struct cache *c = caches + row / length;
        int64_t last = c->position + row % length;
        int64_t first = l->chunked ? last / l->reach * l->reach : last < l->reach ? 0 : last + 1 - l->reach;
        attend(projected + row * 3 * inner + head * each, c->keys + head * c->room * each,
               c->values + head * c->room * each, c->room, each, first, last, attended + row * inner + head * each);
    }
    multiply((struct product){.matrix = &l->output, .rows = rows, .x = attended, .y = between, .plus = x});
    feed_forward(&l->feedforward, rows, between, y);
    free(normed);
}
