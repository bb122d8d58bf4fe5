/* Float32 matrix products and attention for one core with AVX-512: what a training step on a CPU spends its time on.
 *
 * Everything here is one micro-kernel: 7 rows by 64 columns of a result stay in 28 registers while one row of B (64
 * columns, 4 registers) meets one number of each of the 7 rows of A. That is 28 multiply-adds of 16 lanes for 11
 * loads, near the core's peak wherever B lies in the second-level cache; so B is packed into panels of 64 columns.
 * Vectors are GCC's (clang has them too), so the compiler allocates registers; there is no assembly.
 *
 * Called through ctypes, which lets go of Python's lock. Nothing here allocates, or knows of Python.
 */
#include <stddef.h>

#if defined(__x86_64__) && defined(__GNUC__)

#define AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,fma")))
#define INLINE static inline AVX512 __attribute__((always_inline))
#define LANES 16
#define PANEL 64 /* columns of B that are multiplied at once: four vectors */
#define ROWS 7

typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef int ivec __attribute__((vector_size(64), aligned(4)));
typedef ptrdiff_t size;

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec x) { *(vec *)p = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec pick(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return pick(a > b, a, b); }

/* ---------- products ---------- */

/* c[m, 64] = (add ? c : 0) + a[m, k] b[k, 64]; a's numbers lie a_row and a_col apart, b's rows PANEL. */
INLINE void kernel(int m, float *c, size c_row, const float *a, size a_row, size a_col, const float *b, size k, int add) {
    vec sum[ROWS][4];
    for (int r = 0; r < m; r++)
        for (int j = 0; j < 4; j++) sum[r][j] = add ? load(c + r * c_row + j * LANES) : (vec){0};
    for (size i = 0; i < k; i++) {
        vec row[4];
        for (int j = 0; j < 4; j++) row[j] = load(b + i * PANEL + j * LANES);
        for (int r = 0; r < m; r++) {
            const float one = a[r * a_row + i * a_col];
            for (int j = 0; j < 4; j++) sum[r][j] += one * row[j];
        }
    }
    for (int r = 0; r < m; r++)
        for (int j = 0; j < 4; j++) store(c + r * c_row + j * LANES, sum[r][j]);
}

#define CASE(m) \
    case m: kernel(m, c, c_row, a, a_row, a_col, b, k, add); break

/* The same for any number of rows. */
static AVX512 void multiply(float *c, size c_row, const float *a, size a_row, size a_col, const float *b, size m, size k,
                            int add) {
    for (; m > 0; m -= ROWS, c += ROWS * c_row, a += ROWS * a_row) switch (m < ROWS ? m : ROWS) {
            CASE(1);
            CASE(2);
            CASE(3);
            CASE(4);
            CASE(5);
            CASE(6);
            CASE(7);
        }
}

/* Pairs of 32-bit lanes of two vectors, as one step of a transposition wants them. */
#define MIX(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#if defined(__clang__)
#undef MIX
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif

/* 16 rows of 16 numbers to 16 columns: out[i, 0..15] = in[0..15, i]. */
INLINE void transpose(float *out, size out_row, const float *in, size in_row) {
    vec a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = load(in + i * in_row);
    for (int i = 0; i < 16; i += 2) {
        b[i] = MIX(a[i], a[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        b[i + 1] = MIX(a[i], a[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = MIX(b[i + j], b[i + 2 + j], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            a[i + 2 * j + 1] = MIX(b[i + j], b[i + 2 + j], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    /* a[4 g + j] holds column j + 4 q of rows 4 g .. 4 g + 3 in its q-th quarter */
    for (int j = 0; j < 4; j++) {
        vec low = MIX(a[j], a[4 + j], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        vec high = MIX(a[j], a[4 + j], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        vec low2 = MIX(a[8 + j], a[12 + j], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        vec high2 = MIX(a[8 + j], a[12 + j], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        store(out + j * out_row, MIX(low, low2, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23));
        store(out + (4 + j) * out_row, MIX(low, low2, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
        store(out + (8 + j) * out_row, MIX(high, high2, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23));
        store(out + (12 + j) * out_row, MIX(high, high2, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    }
}

/* A panel [k, 64] from columns that lie col apart and rows that lie row apart; columns from n on become zero. */
static AVX512 void pack(float *panel, const float *b, size row, size col, size k, size n) {
    if (n > PANEL) n = PANEL;
    if (col == 1 && n == PANEL) {
        for (size i = 0; i < k; i++)
            for (int j = 0; j < 4; j++) store(panel + i * PANEL + j * LANES, load(b + i * row + j * LANES));
        return;
    }
    size i = 0;
    if (row == 1 && n == PANEL)
        for (; i + LANES <= k; i += LANES)
            for (int j = 0; j < 4; j++) transpose(panel + i * PANEL + j * LANES, PANEL, b + i + j * LANES * col, col);
    for (; i < k; i++)
        for (size j = 0; j < PANEL; j++) panel[i * PANEL + j] = j < n ? b[i * row + j * col] : 0.0f;
}

#define DEEP 512 /* rows of B packed at once: a panel is 128 KB */
#define WIDE 256 /* columns of B packed at once, so that a row of A is read from the nearest cache for four panels */
#define PRODUCT_ROOM (DEEP * WIDE + ROWS * PANEL)

/* c[m, n] = a[m, k] b[k, n], each with its own strides, c's columns next to each other. room: PRODUCT_ROOM floats. */
AVX512 void peagle_product(float *c, size c_row, const float *a, size a_row, size a_col, const float *b, size b_row,
                           size b_col, size m, size n, size k, float *room) {
    float *edge = room + DEEP * WIDE;
    for (size left = 0; left < n; left += WIDE)
        for (size top = 0; top < k; top += DEEP) {
            const size deep = k - top < DEEP ? k - top : DEEP, wide = n - left < WIDE ? n - left : WIDE;
            for (size j = 0; j < wide; j += PANEL)
                pack(room + j * deep, b + top * b_row + (left + j) * b_col, b_row, b_col, deep, wide - j);
            for (size i = 0; i < m; i += ROWS) {
                const size rows = m - i < ROWS ? m - i : ROWS;
                const float *from = a + i * a_row + top * a_col;
                for (size j = 0; j < wide; j += PANEL) {
                    float *to = c + i * c_row + left + j;
                    if (wide - j >= PANEL) {
                        multiply(to, c_row, from, a_row, a_col, room + j * deep, rows, deep, top > 0);
                        continue;
                    }
                    multiply(edge, PANEL, from, a_row, a_col, room + j * deep, rows, deep, 0);
                    for (size r = 0; r < rows; r++)
                        for (size l = 0; l < wide - j; l++)
                            to[r * c_row + l] = edge[r * PANEL + l] + (top > 0 ? to[r * c_row + l] : 0.0f);
                }
            }
        }
}

/* ---------- attention ---------- */

#define BLOCK 256          /* keys whose scores are formed at a time */
#define SCORES (BLOCK + 16) /* a row of scores: not a power of two, or its columns would share cache lines' places */
#define GROUP 28           /* rows that go through softmax while they are in the nearest cache */
#define LOWEST -1e30f      /* stands for the largest score of a row that saw no key yet */

/* Tensors are given by their strides; heads of d numbers lie together. */
typedef struct {
    const float *data;
    size row, head;
} Tensor;

/* Queries that are solved together: rows own_first to own_last see the context's keys context_first to context_last and
 * (with own keys) themselves; mask, [rows, masked], is added to the last columns. */
typedef struct {
    size own_first, own_last, context_first, context_last, masked, mask_row;
    const float *mask;
} Tile;

/* One call. Own keys may be missing (data is NULL). Heads first_head to last_head of the keys are done. */
typedef struct {
    Tensor q, k, v, own_k, own_v, out, grad;    /* grad: of out, backward only */
    Tensor q_grad, k_grad, v_grad, own_k_grad, own_v_grad; /* written (q, own) and added to (k, v) by the backward */
    float *log_sum;                             /* [query heads, queries] */
    const Tile *tiles;
    size num_tiles, num_queries, group, d, first_head, last_head;
    float scale;
    float *room;
} Attention;

/* exp(x) for x <= 0 or a little above, within 2 units in the last place; 0 below -87. */
INLINE vec exponential(vec x) {
    const vec shift = all(12582912.0f);
    vec t = x * all(1.44269504f) + shift, n = t - shift;
    vec r = x - n * all(0.693145752f);
    r = r - n * all(1.42860677e-6f);
    vec p = all(1.98756915e-4f);
    p = p * r + all(1.39819995e-3f);
    p = p * r + all(8.33345191e-3f);
    p = p * r + all(4.16657959e-2f);
    p = p * r + all(1.66666655e-1f);
    p = p * r + all(0.5f);
    p = p * (r * r) + r + all(1.0f);
    ivec exponent = (ivec)t << 23;
    return pick(x > all(-87.0f), (vec)((ivec)p + exponent), (vec){0});
}

INLINE float sum_of(vec x) {
    float found = 0;
    for (int i = 0; i < LANES; i++) found += x[i];
    return found;
}

INLINE float largest_of(vec x) {
    float found = x[0];
    for (int i = 1; i < LANES; i++) found = found > x[i] ? found : x[i];
    return found;
}

INLINE size rounded(size n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* Keys of one head, packed: `across` [keys / 64][d][64] for products with keys' transpose, `along` [d / 64][keys][64]. */
static AVX512 void pack_across(float *to, Tensor x, size head, size first, size last, size d) {
    for (size i = first; i < last; i += PANEL, to += d * PANEL)
        pack(to, x.data + i * x.row + head * x.head, 1, x.row, d, last - i);
}

static AVX512 void pack_along(float *to, Tensor x, size head, size first, size last, size d) {
    for (size j = 0; j < d; j += PANEL, to += (last - first) * PANEL)
        pack(to, x.data + first * x.row + head * x.head + j, x.row, 1, last - first, PANEL);
}

/* A run of keys of one head as the loops below see it. */
typedef struct {
    const float *k_across, *k_along, *v_across, *v_along;
    size start, stop, held; /* start, stop: keys to see; held: keys that were packed */
    size column;            /* which column of all scores the first of them is */
} Keys;

/* scores[rows, n] of one block: queries (or gradients) times keys (or values) of columns at to at + n. */
INLINE void scores_of(float *scores, const float *rows, const float *across, size at, size n, size num_rows, size d) {
    for (size j = 0; j < n; j += PANEL)
        multiply(scores + j, SCORES, rows, d, 1, across + (at + j) / PANEL * d * PANEL, num_rows, d, 0);
}

/* Add the mask, and nothing but -inf behind the last key. */
INLINE void hide(float *scores, const Tile *tile, size row, size num_rows, size column, size n, size num_columns) {
    const size from = num_columns - tile->masked;
    for (size r = 0; r < num_rows; r++) {
        for (size j = from > column ? from - column : 0; j < n; j++)
            scores[r * SCORES + j] += tile->mask[(row + r) * tile->mask_row + column + j - from];
        for (size j = n; j < rounded(n); j++) scores[r * SCORES + j] = -__builtin_inff();
    }
}

/* Contiguous [rows, d] of one head, times a factor. */
INLINE void gather(float *to, Tensor x, size head, size first, size last, size d, float factor) {
    for (size i = first; i < last; i++, to += d)
        for (size j = 0; j < d; j += LANES) store(to + j, load(x.data + i * x.row + head * x.head + j) * factor);
}

static AVX512 void forward_run(const Attention *call, const Tile *tile, const Keys *keys, const float *rows, float *scores,
                               float *found, float *top, float *total, size num_columns) {
    const size d = call->d, num_rows = tile->own_last - tile->own_first;
    for (size at = keys->start; at < keys->stop; at += BLOCK) {
        const size n = keys->stop - at < BLOCK ? keys->stop - at : BLOCK, column = keys->column + at - keys->start;
        for (size i = 0; i < num_rows; i += GROUP) {
            const size here = num_rows - i < GROUP ? num_rows - i : GROUP;
            scores_of(scores, rows + i * d, keys->k_across, at, n, here, d);
            hide(scores, tile, i, here, column, n, num_columns);
            for (size r = 0; r < here; r++) {
                float *row = scores + r * SCORES;
                vec most = all(top[i + r]), sum = {0};
                for (size j = 0; j < rounded(n); j += LANES) most = larger(load(row + j), most);
                const float before = top[i + r], now = largest_of(most);
                for (size j = 0; j < rounded(n); j += LANES) {
                    const vec p = exponential(load(row + j) - all(now));
                    store(row + j, p);
                    sum += p;
                }
                if (now > before) {
                    const float fade = exponential(all(before - now))[0];
                    total[i + r] *= fade;
                    for (size j = 0; j < d; j += LANES)
                        store(found + (i + r) * d + j, load(found + (i + r) * d + j) * fade);
                    top[i + r] = now;
                }
                total[i + r] += sum_of(sum);
            }
            for (size j = 0; j < d; j += PANEL)
                multiply(found + i * d + j, d, scores, SCORES, 1, keys->v_along + (j / PANEL * keys->held + at) * PANEL,
                         here, n, 1);
        }
    }
}

static AVX512 void backward_run(const Attention *call, const Tile *tile, const Keys *keys, size head, size query_head,
                                const float *rows, const float *grads, const float *rows_along,
                                const float *grads_along, const float *pull, float *probs, float *inner, float *found,
                                size num_columns, int is_own) {
    const size d = call->d, num_rows = tile->own_last - tile->own_first;
    const float *log_sum = call->log_sum + query_head * call->num_queries + tile->own_first;
    const Tensor k_grad = is_own ? call->own_k_grad : call->k_grad, v_grad = is_own ? call->own_v_grad : call->v_grad;
    const size base = is_own ? tile->own_first : tile->context_first - keys->start;
    for (size at = keys->start; at < keys->stop; at += BLOCK) {
        const size n = keys->stop - at < BLOCK ? keys->stop - at : BLOCK, column = keys->column + at - keys->start;
        for (size i = 0; i < num_rows; i += GROUP) {
            const size here = num_rows - i < GROUP ? num_rows - i : GROUP;
            float *p = probs + i * SCORES, *g = inner + i * SCORES;
            scores_of(p, rows + i * d, keys->k_across, at, n, here, d);
            hide(p, tile, i, here, column, n, num_columns);
            scores_of(g, grads + i * d, keys->v_across, at, n, here, d);
            for (size r = 0; r < here; r++)
                for (size j = 0; j < rounded(n); j += LANES) {
                    const vec one = exponential(load(p + r * SCORES + j) - all(log_sum[i + r]));
                    store(p + r * SCORES + j, one);
                    store(g + r * SCORES + j, one * (load(g + r * SCORES + j) - all(pull[i + r])));
                }
            for (size j = 0; j < d; j += PANEL)
                multiply(found + i * d + j, d, g, SCORES, 1, keys->k_along + (j / PANEL * keys->held + at) * PANEL, here,
                         n, 1);
        }
        /* The first query head of a group writes the gradients of own keys, the others add. */
        const int add = !is_own || query_head % call->group > 0;
        for (size j = 0; j < d; j += PANEL) {
            float *to_k = (float *)k_grad.data + (base + at) * k_grad.row + head * k_grad.head + j;
            float *to_v = (float *)v_grad.data + (base + at) * v_grad.row + head * v_grad.head + j;
            multiply(to_k, k_grad.row, inner, 1, SCORES, rows_along + j * num_rows, n, num_rows, add);
            multiply(to_v, v_grad.row, probs, 1, SCORES, grads_along + j * num_rows, n, num_rows, add);
        }
    }
}

static AVX512 float *put(float **room, size n) {
    float *found = *room;
    *room += (n + LANES - 1) / LANES * LANES;
    return found;
}

/* Floats of room that a call needs: most_rows of a tile, most_keys of a run of context. */
AVX512 size peagle_attention_room(size most_rows, size most_keys, size d, int is_backward) {
    const size keys = rounded(most_keys) * d, own = rounded(most_rows) * d;
    if (!is_backward) return 2 * keys + 2 * own + GROUP * SCORES + 2 * most_rows * (d + 1) + 16 * LANES;
    return 3 * keys + 3 * own + 2 * most_rows * SCORES + most_rows * (5 * d + 1) + 16 * LANES;
}

static AVX512 void attend(const Attention *call, size most_rows, size most_keys, int is_backward) {
    const size d = call->d;
    float *room = call->room;
    float *k_across = put(&room, rounded(most_keys) * d), *along = put(&room, rounded(most_keys) * d);
    float *own_k_across = put(&room, rounded(most_rows) * d), *own_along = put(&room, rounded(most_rows) * d);
    float *v_across = is_backward ? put(&room, rounded(most_keys) * d) : NULL;
    float *own_v_across = is_backward ? put(&room, rounded(most_rows) * d) : NULL;
    float *scores = put(&room, (is_backward ? most_rows : GROUP) * SCORES);
    float *inner = is_backward ? put(&room, most_rows * SCORES) : NULL;
    float *rows = put(&room, most_rows * d), *found = put(&room, most_rows * d);
    float *grads = is_backward ? put(&room, most_rows * d) : NULL;
    float *rows_along = is_backward ? put(&room, most_rows * d) : NULL;
    float *grads_along = is_backward ? put(&room, most_rows * d) : NULL;
    float *first = put(&room, most_rows), *second = is_backward ? NULL : put(&room, most_rows);
    /* The backward multiplies by keys, the forward by values. */
    const Tensor read_along = is_backward ? call->k : call->v;
    const Tensor own_read_along = is_backward ? call->own_k : call->own_v;

    for (size head = call->first_head; head < call->last_head; head++) {
        size packed_first = 0, packed_last = -1;
        for (size t = 0; t < call->num_tiles; t++) {
            const Tile *tile = call->tiles + t;
            const size num_rows = tile->own_last - tile->own_first, length = tile->context_last - tile->context_first;
            if (tile->context_first != packed_first || tile->context_last > packed_last) {
                packed_first = tile->context_first, packed_last = tile->context_last;
                for (size u = t + 1; u < call->num_tiles && call->tiles[u].context_first == packed_first; u++)
                    if (call->tiles[u].context_last > packed_last) packed_last = call->tiles[u].context_last;
                pack_across(k_across, call->k, head, packed_first, packed_last, d);
                pack_along(along, read_along, head, packed_first, packed_last, d);
                if (is_backward) pack_across(v_across, call->v, head, packed_first, packed_last, d);
            }
            const int has_own = call->own_k.data != NULL;
            if (has_own) {
                pack_across(own_k_across, call->own_k, head, tile->own_first, tile->own_last, d);
                pack_along(own_along, own_read_along, head, tile->own_first, tile->own_last, d);
                if (is_backward) pack_across(own_v_across, call->own_v, head, tile->own_first, tile->own_last, d);
            }
            const size num_columns = length + (has_own ? num_rows : 0);
            const Keys context = {k_across, along, v_across, along, 0, length, packed_last - packed_first, 0};
            const Keys own = {own_k_across, own_along, own_v_across, own_along, 0, num_rows, num_rows, length};
            for (size q = head * call->group; q < (head + 1) * call->group; q++) {
                gather(rows, call->q, q, tile->own_first, tile->own_last, d, call->scale);
                for (size i = 0; i < num_rows * d; i++) found[i] = 0;
                if (!is_backward) {
                    for (size i = 0; i < num_rows; i++) first[i] = LOWEST, second[i] = 0;
                    forward_run(call, tile, &context, rows, scores, found, first, second, num_columns);
                    if (has_own) forward_run(call, tile, &own, rows, scores, found, first, second, num_columns);
                    for (size i = 0; i < num_rows; i++) {
                        float *to = (float *)call->out.data + (tile->own_first + i) * call->out.row + q * call->out.head;
                        const float share = 1.0f / second[i];
                        for (size j = 0; j < d; j += LANES) store(to + j, load(found + i * d + j) * share);
                        call->log_sum[q * call->num_queries + tile->own_first + i] = first[i] + __builtin_logf(second[i]);
                    }
                    continue;
                }
                gather(grads, call->grad, q, tile->own_first, tile->own_last, d, 1.0f);
                /* d loss / d scores = probs * (d loss / d probs - sum over keys of probs * d loss / d probs) */
                for (size i = 0; i < num_rows; i++) {
                    const float *out = call->out.data + (tile->own_first + i) * call->out.row + q * call->out.head;
                    vec sum = {0};
                    for (size j = 0; j < d; j += LANES) sum += load(grads + i * d + j) * load(out + j);
                    first[i] = sum_of(sum);
                }
                for (size j = 0; j < d; j += PANEL) {
                    pack(rows_along + j * num_rows, rows + j, d, 1, num_rows, PANEL);
                    pack(grads_along + j * num_rows, grads + j, d, 1, num_rows, PANEL);
                }
                backward_run(call, tile, &context, head, q, rows, grads, rows_along, grads_along, first, scores, inner,
                             found, num_columns, 0);
                if (has_own)
                    backward_run(call, tile, &own, head, q, rows, grads, rows_along, grads_along, first, scores, inner,
                                 found, num_columns, 1);
                for (size i = 0; i < num_rows; i++) {
                    float *to = (float *)call->q_grad.data + (tile->own_first + i) * call->q_grad.row + q * call->q_grad.head;
                    for (size j = 0; j < d; j += LANES) store(to + j, load(found + i * d + j) * call->scale);
                }
            }
        }
    }
}

AVX512 void peagle_attention(const Attention *call, size most_rows, size most_keys, int is_backward) {
    attend(call, most_rows, most_keys, is_backward);
}

int peagle_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

size peagle_product_room(void) { return PRODUCT_ROOM; }

#else

int peagle_supported(void) { return 0; }

#endif
