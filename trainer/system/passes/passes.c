/* Passes over vectors of floats, each reading its operands once. See __init__.py.

   Compiled with -ffp-contract=off: IEEE 754 rounds every +, -, *, / and square root correctly, so all
   but the sums of squares give the bits that NumPy gives, on every processor. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
/* One function for each kind of vector unit; the one that fits is chosen when the library is loaded. */
#define PASS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PASS
#endif

enum { PIECE = 1024, LANES = 64 };

static inline float decoded(uint16_t upper) {
    uint32_t bits = (uint32_t)upper << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounds to nearest even. A NaN keeps its sign, and loses its payload as in ml_dtypes. */
static inline uint16_t encoded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t rounded = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    uint16_t nan = (uint16_t)((bits >> 16 & 0x8000) | 0x7fc0);
    return (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
}

/* Of at most PIECE values. In floats, 16 to a lane, and then in doubles: the error is below 1e-6 of the
   sum. Where a float overflows or is too small for its last bits, all in doubles. The order of
   additions is the same on every processor. */
static inline double piece_square_sum(const float *restrict values, size_t count) {
    float lanes[LANES] = {0};
    double sum = 0;
    size_t at = 0;
    for (; at + LANES <= count; at += LANES)
        for (size_t lane = 0; lane < LANES; lane++)
            lanes[lane] += values[at + lane] * values[at + lane];
    for (size_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
    for (; at < count; at++) sum += (double)values[at] * values[at];
    if (sum > 1e-30 && sum < INFINITY) return sum;
    sum = 0;
    for (at = 0; at < count; at++) sum += (double)values[at] * values[at];
    return sum;
}

PASS double square_sum(const float *restrict values, size_t count) {
    double sum = 0;
    for (size_t start = 0; start < count; start += PIECE)
        sum += piece_square_sum(values + start, count - start < PIECE ? count - start : PIECE);
    return sum;
}

PASS void bf16_encode(const float *restrict values, uint16_t *restrict out, size_t count) {
    for (size_t at = 0; at < count; at++) out[at] = encoded(values[at]);
}

PASS double bf16_square_sum(const uint16_t *restrict values, size_t count) {
    float piece[PIECE];
    double sum = 0;
    for (size_t start = 0; start < count; start += PIECE) {
        size_t size = count - start < PIECE ? count - start : PIECE;
        for (size_t at = 0; at < size; at++) piece[at] = decoded(values[start + at]);
        sum += piece_square_sum(piece, size);
    }
    return sum;
}

/* Adds in the order given, divides, encodes, and returns the squares of what `out` decodes to. */
PASS double bf16_average(const uint16_t *const *restrict parts, size_t number, float divisor,
                         uint16_t *restrict out, size_t count) {
    float piece[PIECE];
    double sum = 0;
    for (size_t start = 0; start < count; start += PIECE) {
        size_t size = count - start < PIECE ? count - start : PIECE;
        for (size_t at = 0; at < size; at++) piece[at] = decoded(parts[0][start + at]);
        for (size_t part = 1; part < number; part++)
            for (size_t at = 0; at < size; at++) piece[at] += decoded(parts[part][start + at]);
        for (size_t at = 0; at < size; at++) out[start + at] = encoded(piece[at] / divisor);
        for (size_t at = 0; at < size; at++) piece[at] = decoded(out[start + at]);
        sum += piece_square_sum(piece, size);
    }
    return sum;
}

/* AdamW, algorithm 2 of arXiv:1711.05101; the operations and their order are those of adamw.py. */
PASS void adamw(float *restrict weights, const float *restrict gradient, float *restrict mean,
                float *restrict square, size_t count, float clip, float beta1, float rest1, float beta2,
                float rest2, float decay, float step_size, float correction, float epsilon) {
    for (size_t at = 0; at < count; at++) {
        float clipped = gradient[at] * clip;
        mean[at] = mean[at] * beta1 + clipped * rest1;
        square[at] = square[at] * beta2 + clipped * clipped * rest2;
        float divisor = sqrtf(square[at]) / correction + epsilon;
        weights[at] = weights[at] * decay - mean[at] / divisor * step_size;
    }
}
