// The next token of each row from its logits: what `Sampler.draw` (`gss.decode.sampler`) does, without sorting a
// vocabulary. Weights are counted in buckets by their size; only the bucket in which a bound is reached is sorted.
#include "products.h"

enum { TEMPERATURE, TOP_K, TOP_P, MIN_P, PENALTY };
// A bucket has the numbers up to 1 with the same exponent and the same first four bits after it.
enum { BUCKET_BITS = 19, BUCKETS = (127 << (23 - BUCKET_BITS)) + 1 };

static const float COLDEST = 1e-30f;

// Where the largest of some numbers is; −1 where it is not finite, or one is no number.
int64_t gss_largest(int64_t count, const float *x) {
    floats most = {0}, nothing = {0};
    most -= INFINITY;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        floats value = load(x + i);
        most = either(value > most, value, most);
        nothing += either(value != value, value, (floats){0});
    }
    float largest = -INFINITY, wrong = sum(nothing);
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    for (; i < count; i++) {
        largest = x[i] > largest ? x[i] : largest;
        wrong += x[i] != x[i] ? x[i] : 0;
    }
    if (wrong != wrong || !isfinite(largest)) return -1;
    for (i = 0; x[i] != largest; i++);
    return i;
}

static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// `uniform` of `gss.decode.sampler`.
static double uniform(int64_t seed, int64_t counter) {
    return (double)(mixed(mixed((uint64_t)seed + 0x9E3779B97F4A7C15) + (uint64_t)counter) >> 12) * 0x1p-52;
}

static int bucket(float weight) {
    int32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return bits >> BUCKET_BITS < BUCKETS ? bits >> BUCKET_BITS : BUCKETS - 1;
}

static int descending(const void *a, const void *b) {
    float one = *(const float *)a, other = *(const float *)b;
    return (one < other) - (one > other);
}

// Set to 0 all weights but the largest: as many as `most_count`, and no more than reach the sum `bound`. `room` is for
// as many numbers. Of equal weights at the end, the first are kept.
static void cut(int64_t size, float *weight, int64_t most_count, double bound, float *room) {
    int64_t counts[BUCKETS] = {0}, count = 0, inside = 0;
    double sums[BUCKETS] = {0}, reached = 0;
    for (int64_t i = 0; i < size; i++) {
        int at = bucket(weight[i]);
        counts[at]++, sums[at] += weight[i];
    }
    int last = BUCKETS - 1;
    for (; last > 0 && count + counts[last] < most_count && reached + sums[last] < bound; last--)
        count += counts[last], reached += sums[last];
    for (int64_t i = 0; i < size; i++) if (bucket(weight[i]) == last) room[inside++] = weight[i];
    qsort(room, inside, sizeof *room, descending);
    float least = INFINITY;
    int64_t equal = 0;
    for (int64_t i = 0; i < inside && count < most_count && reached < bound; i++) {
        equal = room[i] == least ? equal + 1 : 1;
        least = room[i], reached += least, count++;
    }
    for (int64_t i = 0; i < size; i++) {
        if (bucket(weight[i]) < last || weight[i] < least) weight[i] = 0;
        else if (weight[i] == least && equal-- <= 0) weight[i] = 0;
    }
}

static double total_of(int64_t size, const float *weight) {
    double total = 0;
    for (int64_t i = 0; i < size; i++) total += weight[i];
    return total;
}

// The row's options are numbers[option · capacity].
static int64_t draw(int64_t size, const float *logits, int64_t peak, const double *numbers, int64_t capacity,
                    double noise, float *weight) {
    double top_p = numbers[TOP_P * capacity], top_k = numbers[TOP_K * capacity];
    float temperature = (float)numbers[TEMPERATURE * capacity], min_p = (float)numbers[MIN_P * capacity];
    temperature = temperature < COLDEST ? COLDEST : temperature;
    for (int64_t i = 0; i < size; i += LANES) {
        floats value = {0};
        size_t bytes = (size - i < LANES ? size - i : LANES) * sizeof(float);
        memcpy(&value, logits + i, bytes);
        value = (value - logits[peak]) / temperature;
        value = either(value < -87, (floats){0}, exponential(value));
        value = either(value < min_p, (floats){0}, value);
        memcpy(weight + i, &value, bytes);
    }
    double total = total_of(size, weight);
    if (top_k < size) cut(size, weight, (int64_t)top_k, INFINITY, weight + size), total = total_of(size, weight);
    if (top_p < 1) cut(size, weight, size, top_p * total, weight + size), total = total_of(size, weight);
    double target = noise * total, reached = 0;
    int64_t last = peak;
    for (int64_t i = 0; i < size; i++) {
        if (weight[i] > 0) last = i;
        reached += weight[i];
        if (reached > target) break;
    }
    return last;
}

// logits [rows, size] may be changed; numbers [options, capacity]; seen [rows, size], or NULL without a penalty.
void gss_draw(int64_t rows, int64_t size, int64_t capacity, float *logits, const double *numbers, const int64_t *seed,
              const int64_t *position, uint8_t *seen, int64_t *tokens) {
    float *weight = malloc(2 * size * sizeof(float));
    for (int64_t row = 0; row < rows; row++, logits += size, numbers++) {
        float penalty = (float)numbers[PENALTY * capacity], inverse = (float)(1 / numbers[PENALTY * capacity]);
        uint8_t *own = seen ? seen + row * size : NULL;
        for (int64_t i = 0; own && i < size; i++) if (own[i]) logits[i] *= logits[i] > 0 ? inverse : penalty;
        int64_t token = gss_largest(size, logits);
        if (token >= 0 && numbers[TEMPERATURE * capacity] > 0)
            token = draw(size, logits, token, numbers, capacity, uniform(seed[row], position[row]), weight);
        if (own && token >= 0) own[token] = 1;
        tokens[row] = token;
    }
    free(weight);
}
