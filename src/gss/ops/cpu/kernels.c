// Products of a few rows with a large matrix, and steps of a blocked state space, at the speed of memory.
//
// Compiled on first use by `gss.ops.cpu`, for the machine that it runs on; plain C with GCC's vector types. A row's
// results do not depend on how many rows stand beside it, to the last bit: each has accumulators of its own, which
// take the terms in the same order.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

enum { FLOAT32, BFLOAT16, INT8, INT4 };
enum { MOST_ROWS = 8, LANES = 16, GROUP = 64, TILE = LANES * GROUP, AHEAD = 2048 };

typedef float floats __attribute__((vector_size(64)));
typedef float floats8 __attribute__((vector_size(32)));
typedef float floats4 __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint8_t bytes __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
#define INLINE static inline __attribute__((always_inline))
#define EACH(index, count) _Pragma("GCC unroll 8") for (int index = 0; index < (count); index++)

struct product {
    int64_t rows, inputs, outputs;
    const void *matrix;    // [outputs, inputs], or tiles of 16 outputs
    const float *scale;    // [tiles, groups, 16]
    const float *bias;     // [outputs], or NULL
    const float *x;        // [rows, inputs]
    const int8_t *small;   // the same in 8 bits
    const float *x_scale;  // [rows, groups]
    const int32_t *shift;  // [rows, groups]: what the weights' offset adds to the sums of a group, negated
    float *y;              // [rows, outputs]
};

INLINE floats load(const float *from) {
    floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE floats load_bfloat16(const uint16_t *from) {
    halves value;
    memcpy(&value, from, sizeof value);
    return (floats)(__builtin_convertvector(value, ints) << 16);
}

INLINE float sum(floats v) {
    floats8 eight[2];
    floats4 four[2];
    memcpy(eight, &v, sizeof v);
    eight[0] += eight[1];
    memcpy(four, eight, sizeof *eight);
    four[0] += four[1];
    return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

// Dot product of any length.
INLINE float dot(const float *a, const float *b, int64_t length) {
    floats total = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES) total += load(a + i) * load(b + i);
    for (; i < length; i++) rest = fmaf(a[i], b[i], rest);
    return sum(total) + rest;
}

// One output of `rows` rows. Where fewer rows are wanted, the first one stands in for those that are missing.
INLINE void output_block(const struct product *p, int64_t output, int rows, int kind) {
    floats total[MOST_ROWS][2];
    const float *x[MOST_ROWS];
    int64_t size = kind == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    const char *weights = (const char *)p->matrix + output * p->inputs * size;
    EACH(r, rows) x[r] = p->x + (r < p->rows ? r : 0) * p->inputs;
    EACH(r, rows) total[r][0] = total[r][1] = (floats){0};
    for (int64_t i = 0; i < p->inputs; i += 2 * LANES) EACH(half, 2) {
        const char *from = weights + (i + half * LANES) * size;
        __builtin_prefetch(from + AHEAD);
        floats w = kind == FLOAT32 ? load((const float *)from) : load_bfloat16((const uint16_t *)from);
        EACH(r, rows) total[r][half] += w * load(x[r] + i + half * LANES);
    }
    EACH(r, rows) {
        if (r >= p->rows) break;
        p->y[r * p->outputs + output] = sum(total[r][0] + total[r][1]) + (p->bias ? p->bias[output] : 0);
    }
}

// Four inputs times four weights for each of sixteen outputs, on top of `total`.
INLINE ints multiply_add(ints total, bytes weights, const int8_t *inputs) {
#ifdef __AVX512VNNI__
    int32_t four;
    memcpy(&four, inputs, sizeof four);
    return (ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, _mm512_set1_epi32(four));
#else
    for (int i = 0; i < 4 * LANES; i++) total[i / 4] += weights[i] * inputs[i % 4];
    return total;
#endif
}

// Sixteen outputs of `rows` rows from a tile of weights, [inputs / 4, 16, 4], offset to be positive. In 4 bits two such
// slices share their bytes, the first one below.
INLINE void tile_block(const struct product *p, int64_t tile, int rows, int kind) {
    int64_t groups = p->inputs / GROUP, size = kind == INT8 ? TILE : TILE / 2;
    const uint8_t *weights = (const uint8_t *)p->matrix + tile * groups * size;
    floats total[MOST_ROWS];
    int64_t row[MOST_ROWS];
    EACH(r, rows) row[r] = r < p->rows ? r : 0;
    EACH(r, rows) total[r] = (floats){0};
    for (int64_t g = 0; g < groups; g++, weights += size) {
        floats scale = load(p->scale + (tile * groups + g) * LANES);
        ints sums[MOST_ROWS][2];
        EACH(r, rows) sums[r][0] = (ints){0} + p->shift[row[r] * groups + g], sums[r][1] = (ints){0};
        EACH(slice, 8) {
            bytes one, two;
            if (kind == INT8) {
                memcpy(&one, weights + 128 * slice, 64);
                memcpy(&two, weights + 128 * slice + 64, 64);
            } else {
                memcpy(&one, weights + 64 * slice, 64);
                two = (bytes)((ints)one >> 4) & 15;
                one &= 15;
            }
            EACH(r, rows) {
                const int8_t *inputs = p->small + row[r] * p->inputs + g * GROUP + 8 * slice;
                sums[r][0] = multiply_add(sums[r][0], one, inputs);
                sums[r][1] = multiply_add(sums[r][1], two, inputs + 4);
            }
        }
        EACH(r, rows) {
            ints both = sums[r][0] + sums[r][1];
            total[r] += __builtin_convertvector(both, floats) * (scale * p->x_scale[row[r] * groups + g]);
        }
    }
    int64_t first = tile * LANES, count = p->outputs - first < LANES ? p->outputs - first : LANES;
    EACH(r, rows) {
        if (r >= p->rows) break;
        for (int o = 0; o < count; o++)
            p->y[r * p->outputs + first + o] = total[r][o] + (p->bias ? p->bias[first + o] : 0);
    }
}

INLINE void sixteen(const struct product *p, int64_t tile, int rows, int kind) {
    int64_t first = tile * LANES, last = first + LANES < p->outputs ? first + LANES : p->outputs;
    if (kind == INT8 || kind == INT4) tile_block(p, tile, rows, kind);
    else for (int64_t output = first; output < last; output++) output_block(p, output, rows, kind);
}

#define ROWS_OF(kind)                                                                        \
    static void over_##kind(const struct product *p, int64_t tile) {                         \
        if (p->rows == 1) sixteen(p, tile, 1, kind);                                         \
        else if (p->rows == 2) sixteen(p, tile, 2, kind);                                    \
        else if (p->rows <= 4) sixteen(p, tile, 4, kind);                                    \
        else sixteen(p, tile, 8, kind);                                                      \
    }
ROWS_OF(FLOAT32)
ROWS_OF(BFLOAT16)
ROWS_OF(INT8)
ROWS_OF(INT4)

// Inputs in 8 bits, with a scale per group.
static void round_inputs(const struct product *p, int offset, int8_t *small, float *scale, int32_t *shift) {
    for (int64_t g = 0; g < p->rows * (p->inputs / GROUP); g++) {
        const float *x = p->x + g * GROUP;
        float most = 0;
        for (int i = 0; i < GROUP; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        float inverse = most > 0 ? 127 / most : 0;
        int32_t total = 0;
        for (int i = 0; i < GROUP; i++) {
            int32_t value = (int32_t)rintf(x[i] * inverse);
            small[g * GROUP + i] = (int8_t)value;
            total += value;
        }
        scale[g] = most / 127;
        shift[g] = -offset * total;
    }
}

// y [rows, outputs] = x [rows, inputs] · matrixᵀ + bias, for 1 to 8 rows; inputs in multiples of 32 (small weights: 64).
void gss_product(int kind, int64_t rows, int64_t inputs, int64_t outputs, const float *x, const void *matrix,
                 const float *scale, const float *bias, float *y) {
    static void (*const over[])(const struct product *, int64_t) = {over_FLOAT32, over_BFLOAT16, over_INT8, over_INT4};
    struct product p = {rows, inputs, outputs, matrix, scale, bias, x, NULL, NULL, NULL, y};
    char *scratch = NULL;
    if (kind == INT8 || kind == INT4) {
        int64_t groups = rows * (inputs / GROUP);
        scratch = malloc(groups * (GROUP + sizeof(float) + sizeof(int32_t)));
        float *x_scale = (float *)scratch;
        int32_t *shift = (int32_t *)(x_scale + groups);
        int8_t *small = (int8_t *)(shift + groups);
        round_inputs(&p, kind == INT8 ? 128 : 8, small, x_scale, shift);
        p.small = small, p.x_scale = x_scale, p.shift = shift;
    }
    int64_t tiles = (outputs + LANES - 1) / LANES;
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++) over[kind](&p, tile);
    free(scratch);
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
