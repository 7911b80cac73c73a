/* decode_attention's algorithm in C intrinsics, as a peer to measure against: bf16 KV in blocks (P, K, 2, BLOCK, DIM), one
 * task per run of tokens of all heads, tiles of BLOCK tokens, online softmax in base 2, the parts of a sequence merged.
 * GROUP, DIM, BLOCK and LANES (16 for AVX-512, 8 for AVX2) are given on the command line. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if LANES == 16
typedef __m512 vec;
#define V(name) _mm512_##name
typedef __m512i ints;
#define load_ints(p) _mm512_loadu_si512(p)
#define even(x) _mm512_castsi512_ps(_mm512_slli_epi32(x, 16))
#define odd(x) _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000)))
#define add_ints(x, y) _mm512_add_epi32(x, y)
#define shift_left(x, n) _mm512_slli_epi32(x, n)
#define as_ints(x) _mm512_castps_si512(x)
#define as_floats(x) _mm512_castsi512_ps(x)
#define set_ints(x) _mm512_set1_epi32(x)
#define any_above(x, y) _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ)
#define permuted(index, x) _mm512_permutexvar_ps(index, x)
#else
typedef __m256 vec;
#define V(name) _mm256_##name
typedef __m256i ints;
#define load_ints(p) _mm256_loadu_si256((const __m256i *)(p))
#define even(x) _mm256_castsi256_ps(_mm256_slli_epi32(x, 16))
#define odd(x) _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff0000)))
#define add_ints(x, y) _mm256_add_epi32(x, y)
#define shift_left(x, n) _mm256_slli_epi32(x, n)
#define as_ints(x) _mm256_castps_si256(x)
#define as_floats(x) _mm256_castsi256_ps(x)
#define set_ints(x) _mm256_set1_epi32(x)
#define any_above(x, y) _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_GT_OQ))
#define permuted(index, x) _mm256_permutevar8x32_ps(x, index)
#endif

#define MOST (LANES / 4)
#define HEADS (GROUP < MOST ? GROUP : MOST)   /* query heads that share the rows in registers */
#define TOKENS (LANES / HEADS)                /* lane = head * TOKENS + token */
#define CHUNKS (GROUP / HEADS)
#define VECTORS (BLOCK / TOKENS)              /* scores of a tile and HEADS heads */
#define WIDE (2 * LANES)
#define STEPS (DIM / WIDE)                    /* loads of a row */
#define PASS (HEADS > 2 ? 2 : STEPS)          /* loads of a row per pass over V: as many sums as registers hold */

/* One vector whose lane i is the sum of a[i]. */
static inline vec sums(vec *a) {
#if LANES == 16
    vec t[8], u[4], w[2];
    for (int i = 0; i < 8; i++)
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(t[2 * i]), y = _mm512_castps_pd(t[2 * i + 1]);
        u[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; i++)
        w[i] = _mm512_add_ps(_mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(w[0], w[1], 0x88), _mm512_shuffle_f32x4(w[0], w[1], 0xdd));
#else
    vec t[4], u[2];
    for (int i = 0; i < 4; i++) t[i] = _mm256_hadd_ps(a[2 * i], a[2 * i + 1]);
    for (int i = 0; i < 2; i++) u[i] = _mm256_hadd_ps(t[2 * i], t[2 * i + 1]);
    return _mm256_add_ps(_mm256_permute2f128_ps(u[0], u[1], 0x20), _mm256_permute2f128_ps(u[0], u[1], 0x31));
#endif
}

/* 2**x for x <= 0, by Taylor terms of the fraction. */
static inline vec exp2_of(vec x) {
    x = V(max_ps)(x, V(set1_ps)(-126.f));
    vec shift = V(set1_ps)(12582912.f), shifted = V(add_ps)(x, shift), f = V(sub_ps)(x, V(sub_ps)(shifted, shift));
    const float c[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f};
    vec p = V(set1_ps)(c[0]);
    for (int i = 1; i < 7; i++) p = V(fmadd_ps)(p, f, V(set1_ps)(c[i]));
    return V(mul_ps)(p, as_floats(shift_left(add_ints(as_ints(shifted), set_ints(127)), 23)));
}

static inline vec largest(vec x) {
    for (int step = TOKENS / 2; step; step /= 2) {
        int index[LANES];
        for (int i = 0; i < LANES; i++) index[i] = i ^ step;
        x = V(max_ps)(x, permuted(load_ints(index), x));
    }
    return x;
}

static inline void prefetch(const uint16_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

/* Scores of a tile: s[v] holds TOKENS tokens of HEADS heads. */
static inline void scores(const float *q, const uint16_t *k, const uint16_t *soon, vec *s, int count) {
    for (int v = 0; v * TOKENS < count; v++) {
        vec a[LANES];
        for (int i = 0; i < LANES; i++) a[i] = V(setzero_ps)();
        const uint16_t *rows = k + v * TOKENS * DIM;
#pragma GCC unroll 8
        for (int c = 0; c < STEPS; c++) {
            vec qe[HEADS], qo[HEADS];
            for (int g = 0; g < HEADS; g++) {
                qe[g] = V(loadu_ps)(q + g * DIM + c * WIDE);
                qo[g] = V(loadu_ps)(q + g * DIM + c * WIDE + LANES);
            }
            for (int t = 0; t < TOKENS; t++) {
                ints x = load_ints(rows + t * DIM + c * WIDE);
                if (soon) prefetch(soon + (v * TOKENS + t) * DIM + c * WIDE);
                for (int g = 0; g < HEADS; g++) {
                    int i = g * TOKENS + t;
                    a[i] = V(fmadd_ps)(odd(x), qo[g], V(fmadd_ps)(even(x), qe[g], a[i]));
                }
            }
        }
        s[v] = sums(a);
    }
}

/* sum += weights * V, PASS loads of each row at a time. */
static inline void weighted(const float *s, const uint16_t *v, const uint16_t *soon, float *sum, int count) {
    for (int begin = 0; begin < STEPS; begin += PASS) {
        vec a[HEADS][2 * PASS];
        for (int g = 0; g < HEADS; g++)
            for (int j = 0; j < 2 * PASS; j++) a[g][j] = V(loadu_ps)(sum + g * DIM + begin * WIDE + j * LANES);
        for (int t = 0; t < count; t++) {
            vec x[2 * PASS];
            for (int j = 0; j < PASS; j++) {
                ints row = load_ints(v + t * DIM + (begin + j) * WIDE);
                x[2 * j] = even(row), x[2 * j + 1] = odd(row);
                if (soon) prefetch(soon + t * DIM + (begin + j) * WIDE);
            }
            for (int g = 0; g < HEADS; g++) {
                vec w = V(set1_ps)(s[t / TOKENS * LANES + g * TOKENS + t % TOKENS]);
                for (int j = 0; j < 2 * PASS; j++) a[g][j] = V(fmadd_ps)(w, x[j], a[g][j]);
            }
        }
        for (int g = 0; g < HEADS; g++)
            for (int j = 0; j < 2 * PASS; j++) V(storeu_ps)(sum + g * DIM + begin * WIDE + j * LANES, a[g][j]);
    }
}

/* Scores to weights relative to the new maximum; the running sums shrink where it moved. */
static inline void softmax(vec *s, int count, vec *top, vec *total, float *sum) {
    vec high = *top;
    for (int t = count; t < BLOCK; t++)
        for (int g = 0; g < HEADS; g++) ((float *)s)[t / TOKENS * LANES + g * TOKENS + t % TOKENS] = -INFINITY;
    for (int v = 0; v < VECTORS; v++) high = V(max_ps)(high, s[v]);
    high = largest(high);
    if (any_above(high, *top)) {
        vec shrink = exp2_of(V(sub_ps)(*top, high));
        *total = V(mul_ps)(*total, shrink);
        for (int g = 0; g < HEADS; g++) {
            vec by = V(set1_ps)(((float *)&shrink)[g * TOKENS]);
            for (int j = 0; j < DIM; j += LANES)
                V(storeu_ps)(sum + g * DIM + j, V(mul_ps)(by, V(loadu_ps)(sum + g * DIM + j)));
        }
        *top = high;
    }
    for (int v = 0; v < VECTORS; v++) {
        s[v] = exp2_of(V(sub_ps)(s[v], high));
        *total = V(add_ps)(*total, s[v]);
    }
}

/* Even elements of WIDE before the odd ones, as the loads of bf16 bring them; `back` undoes it. */
static void reorder(const float *from, float *to, float by, int back) {
    for (int c = 0; c < DIM; c += WIDE)
        for (int i = 0; i < LANES; i++)
            for (int half = 0; half < 2; half++) {
                int apart = c + half * LANES + i, together = c + 2 * i + half;
                to[back ? together : apart] = by * from[back ? apart : together];
            }
}

/* Take tasks (sequence, first token, end, place) until none is left. A sequence's only task has place -1 and stores its
 * result; others leave maximum, sum and values in tops, totals (parts, heads) and values (parts, heads, DIM). */
void serve(const float *q, const uint16_t *kv, const int32_t *table, int width, int kv_heads, const int64_t *tasks,
           int64_t count, int64_t *counter, float scale, float *tops, float *totals, float *values, float *out) {
    const int64_t half = BLOCK * DIM, whole = 2 * half * kv_heads;
    int heads = kv_heads * GROUP, units = kv_heads * CHUNKS;
    float packed[heads * DIM] __attribute__((aligned(64))), own[heads * DIM] __attribute__((aligned(64)));
    vec top[units], total[units], s[VECTORS];
    for (int64_t i; (i = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED)) < count;) {
        const int64_t *task = tasks + 4 * i, end = task[2], place = task[3];
        const int32_t *blocks = table + task[0] * width;
        float *sum = place < 0 ? own : values + place * heads * DIM;
        memset(sum, 0, sizeof(float) * heads * DIM);
        for (int h = 0; h < heads; h++) reorder(q + (task[0] * heads + h) * DIM, packed + h * DIM, scale, 0);
        for (int u = 0; u < units; u++) top[u] = V(set1_ps)(-1e30f), total[u] = V(setzero_ps)();
        for (int64_t token = task[1]; token < end; token += BLOCK) {
            const uint16_t *block = kv + blocks[token / BLOCK] * whole;
            const uint16_t *next = token + BLOCK < end ? kv + blocks[token / BLOCK + 1] * whole : block;
            int here = end - token < BLOCK ? end - token : BLOCK;
            for (int h = 0; h < kv_heads; h++) {
                const uint16_t *k = block + 2 * half * h, *soon = h + 1 < kv_heads ? k + 2 * half : next;
                for (int c = 0; c < CHUNKS; c++) {
                    int unit = h * CHUNKS + c, head = unit * HEADS;
                    /* with one or two heads it is slower: 15.9 GB/s against 16.7 on a Zen 4 core */
                    const uint16_t *ahead = GROUP > 2 && c + 1 == CHUNKS ? soon : 0;
                    scores(packed + head * DIM, k, ahead, s, here);
                    softmax(s, here, top + unit, total + unit, sum + head * DIM);
                    weighted((float *)s, k + half, ahead ? ahead + half : 0, sum + head * DIM, here);
                }
            }
        }
        for (int h = 0; h < heads; h++) {
            const float *lanes = (float *)(total + h / HEADS) + h % HEADS * TOKENS;
            float of_head = 0;
            for (int x = 0; x < TOKENS; x++) of_head += lanes[x];
            if (place < 0) {
                reorder(own + h * DIM, out + (task[0] * heads + h) * DIM, 1 / of_head, 1);
            } else {
                totals[place * heads + h] = of_head;
                tops[place * heads + h] = ((float *)(top + h / HEADS))[h % HEADS * TOKENS];
            }
        }
    }
}

/* The result of a sequence from its parts, which are side by side. */
void merge(int parts, int heads, const float *tops, const float *totals, const float *values, float *out) {
    for (int h = 0; h < heads; h++) {
        float high = -INFINITY, total = 0, sum[DIM] = {0};
        for (int p = 0; p < parts; p++) high = fmaxf(high, tops[p * heads + h]);
        for (int p = 0; p < parts; p++) {
            float share = exp2f(tops[p * heads + h] - high);
            total += share * totals[p * heads + h];
            for (int d = 0; d < DIM; d++) sum[d] += share * values[(p * heads + h) * DIM + d];
        }
        reorder(sum, out + h * DIM, 1 / total, 1);
    }
}
