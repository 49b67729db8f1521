// Products of a few rows with a large matrix, at the speed of memory, and the norms and activations around them.
//
// Plain C with GCC's vector types. A row's results do not depend on how many rows stand beside it, to the last bit:
// each has accumulators of its own, which take the terms in the same order.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

enum { FLOAT32, BFLOAT16, INT8, INT4 };
enum { IDENTITY, GELU, SWISH, RELU, RELU2 };
enum { MOST_ROWS = 8, LANES = 16, GROUP = 64, TILE = LANES * GROUP };

typedef float floats __attribute__((vector_size(64)));
typedef float floats8 __attribute__((vector_size(32)));
typedef float floats4 __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint8_t bytes __attribute__((vector_size(64)));
typedef int8_t bytes16 __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(32)));
#define INLINE static inline __attribute__((always_inline))
#define EACH(index, count) _Pragma("GCC unroll 8") for (int index = 0; index < (count); index++)

struct matrix {
    int64_t kind, inputs, outputs;
    const void *values;  // [outputs, inputs], or tiles of 16 outputs
    const float *scale;  // [tiles, groups, 16]
    const float *bias;   // [outputs], or NULL
};

// y = φ(x·matrixᵀ + bias) ∗ times + plus, the last two where they are not NULL
struct product {
    const struct matrix *matrix;
    int64_t rows;
    const float *x;               // [rows, inputs]
    float *y;                     // [rows, outputs], like `times` and `plus`
    const float *times, *plus;
    int64_t activation;           // φ
    const int8_t *small;          // the inputs in 8 bits
    const float *x_scale;         // [rows, groups]
    const int32_t *shift;         // [rows, groups]: what the weights' offset adds to the sums of a group, negated
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

INLINE floats either(ints chosen, floats one, floats other) {
    return (floats)((chosen & (ints)one) | (~chosen & (ints)other));
}

// e to the power of numbers that are not positive, to float32's precision.
INLINE floats exponential(floats x) {
    x = either(x < -87, (floats){0} - 87, x);
    ints whole = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
    floats k = __builtin_convertvector(whole, floats), r = x - k * 0.693359375f + k * 2.12194440e-4f;
    floats p = ((((r * 1.3981999507e-3f + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r +
                5.0000001201e-1f) * r * r + r + 1;
    return p * (floats)((whole + 127) << 23);
}

// x·Φ(x), by Hastings' formula for the error function, whose error is 1.5e-7.
INLINE floats gelu(floats x) {
    floats size = either(x < 0, -x, x) * 0.70710678f, t = 1 / (1 + 0.3275911f * size);
    floats tail = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t *
                  exponential(-size * size) * 0.5f;
    return x * either(x < 0, tail, 1 - tail);
}

INLINE floats swish(floats x) {
    floats e = exponential(either(x < 0, x, -x));
    return x * either(x < 0, e, (floats){0} + 1) / (1 + e);
}

INLINE floats activated(int64_t activation, floats x) {
    if (activation == GELU) return gelu(x);
    if (activation == SWISH) return swish(x);
    if (activation == IDENTITY) return x;
    floats positive = either(x < 0, (floats){0}, x);
    return activation == RELU ? positive : positive * positive;
}

// The sums of sixteen outputs of a row become what is asked for.
INLINE void finish(const struct product *p, int64_t row, int64_t first, floats value) {
    int64_t outputs = p->matrix->outputs, at = row * outputs + first;
    size_t bytes = (outputs - first < LANES ? outputs - first : LANES) * sizeof(float);
    floats other = {0};
    if (p->matrix->bias) memcpy(&other, p->matrix->bias + first, bytes), value += other;
    value = activated(p->activation, value);
    if (p->times) memcpy(&other, p->times + at, bytes), value *= other;
    if (p->plus) memcpy(&other, p->plus + at, bytes), value += other;
    memcpy(p->y + at, &value, bytes);
}

// Sixteen outputs of `rows` rows. Where fewer rows are wanted, the first one stands in for those that are missing.
INLINE void floats_block(const struct product *p, int64_t tile, int rows, int kind) {
    int64_t inputs = p->matrix->inputs, left = p->matrix->outputs - tile * LANES;
    int64_t size = kind == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    const float *x[MOST_ROWS];
    floats sums[MOST_ROWS] = {0};
    EACH(r, rows) x[r] = p->x + (r < p->rows ? r : 0) * inputs;
    for (int o = 0; o < (left < LANES ? left : LANES); o++) {
        const char *weights = (const char *)p->matrix->values + (tile * LANES + o) * inputs * size;
        floats total[MOST_ROWS][2];
        EACH(r, rows) total[r][0] = total[r][1] = (floats){0};
        for (int64_t i = 0; i < inputs; i += 2 * LANES) EACH(half, 2) {
            const char *from = weights + (i + half * LANES) * size;
            floats w = kind == FLOAT32 ? load((const float *)from) : load_bfloat16((const uint16_t *)from);
            EACH(r, rows) total[r][half] += w * load(x[r] + i + half * LANES);
        }
        EACH(r, rows) ((float *)&sums[r])[o] = sum(total[r][0] + total[r][1]);
    }
    EACH(r, rows) if (r < p->rows) finish(p, r, tile * LANES, sums[r]);
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
INLINE void groups_block(const struct product *p, int64_t tile, int rows, int kind) {
    int64_t inputs = p->matrix->inputs, groups = inputs / GROUP, size = kind == INT8 ? TILE : TILE / 2;
    const uint8_t *weights = (const uint8_t *)p->matrix->values + tile * groups * size;
    floats total[MOST_ROWS];
    int64_t row[MOST_ROWS];
    EACH(r, rows) row[r] = r < p->rows ? r : 0;
    EACH(r, rows) total[r] = (floats){0};
    for (int64_t g = 0; g < groups; g++, weights += size) {
        floats scale = load(p->matrix->scale + (tile * groups + g) * LANES);
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
                const int8_t *four = p->small + row[r] * inputs + g * GROUP + 8 * slice;
                sums[r][0] = multiply_add(sums[r][0], one, four);
                sums[r][1] = multiply_add(sums[r][1], two, four + 4);
            }
        }
        EACH(r, rows) {
            ints both = sums[r][0] + sums[r][1];
            total[r] += __builtin_convertvector(both, floats) * (scale * p->x_scale[row[r] * groups + g]);
        }
    }
    EACH(r, rows) if (r < p->rows) finish(p, r, tile * LANES, total[r]);
}

#define ROWS_OF(kind, block)                                                                 \
    static void over_##kind(const struct product *p, int64_t tile) {                         \
        if (p->rows == 1) block(p, tile, 1, kind);                                           \
        else if (p->rows == 2) block(p, tile, 2, kind);                                      \
        else if (p->rows <= 4) block(p, tile, 4, kind);                                      \
        else block(p, tile, 8, kind);                                                        \
    }
ROWS_OF(FLOAT32, floats_block)
ROWS_OF(BFLOAT16, floats_block)
ROWS_OF(INT8, groups_block)
ROWS_OF(INT4, groups_block)

// Inputs in 8 bits, with a scale per group.
static void round_inputs(const struct product *p, int offset, int8_t *small, float *scale, int32_t *shift) {
    for (int64_t g = 0; g < p->rows * (p->matrix->inputs / GROUP); g++) {
        const float *x = p->x + g * GROUP;
        floats sizes = {0}, nothing = {0};
        float most = 0;
        EACH(i, 4) {
            floats value = load(x + i * LANES), size = either(value < 0, -value, value);
            sizes = either(size > sizes, size, sizes);
            nothing += value * 0;  // unless one of them is no number
        }
        EACH(i, LANES) most = sizes[i] > most ? sizes[i] : most;
        float inverse = most > 0 ? 127 / most : 0;
        ints total = {0};
        EACH(i, 4) {
            const float whole = 12582912;  // 1.5 · 2²³: a sum with it has no fraction
            ints value = __builtin_convertvector(load(x + i * LANES) * inverse + whole - whole, ints);
            bytes16 narrow = __builtin_convertvector(value, bytes16);
            memcpy(small + g * GROUP + i * LANES, &narrow, sizeof narrow);
            total += value;
        }
        scale[g] = most / 127 + sum(nothing);
        shift[g] = 0;
        EACH(i, LANES) shift[g] -= offset * total[i];
    }
}

// For 1 to 8 rows; inputs in multiples of 32 (small weights: 64).
static void multiply(struct product p) {
    static void (*const over[])(const struct product *, int64_t) = {over_FLOAT32, over_BFLOAT16, over_INT8, over_INT4};
    int64_t kind = p.matrix->kind, tiles = (p.matrix->outputs + LANES - 1) / LANES;
    char *scratch = NULL;
    if (kind == INT8 || kind == INT4) {
        int64_t groups = p.rows * (p.matrix->inputs / GROUP);
        scratch = malloc(groups * (GROUP + sizeof(float) + sizeof(int32_t)));
        float *x_scale = (float *)scratch;
        int32_t *shift = (int32_t *)(x_scale + groups);
        int8_t *small = (int8_t *)(shift + groups);
        round_inputs(&p, kind == INT8 ? 128 : 8, small, x_scale, shift);
        p.small = small, p.x_scale = x_scale, p.shift = shift;
    }
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++) over[kind](&p, tile);
    free(scratch);
}

struct norm {
    int64_t centred;  // LayerNorm; else RMSNorm
    double epsilon;
    const float *weight, *bias;
};

static void normalize(const struct norm *norm, int64_t rows, int64_t width, const float *x, float *y) {
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        floats sums = {0}, squares = {0};
        if (norm->centred) for (int64_t i = 0; i < width; i += LANES) sums += load(x + i);
        float mean = sum(sums) / width;
        for (int64_t i = 0; i < width; i += LANES) {
            floats off = load(x + i) - mean;
            squares += off * off;
        }
        float scale = 1 / sqrtf(sum(squares) / width + (float)norm->epsilon);
        for (int64_t i = 0; i < width; i++)
            y[i] = (x[i] - mean) * scale * norm->weight[i] + (norm->bias ? norm->bias[i] : 0);
    }
}
