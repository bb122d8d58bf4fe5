/* Float32 matrix products and attention for one core with AVX-512: what a training step on a CPU spends its time on.
 *
 * Everything here is one micro-kernel: 7 rows by 64 columns of a result stay in 28 registers while one row of B (64
 * columns, 4 registers) meets one number of each of the 7 rows of A. That is 28 multiply-adds of 16 lanes for 11
 * loads, near the core's peak wherever B lies in the second-level cache; so B is packed into panels of 64 columns.
 * Vectors are GCC's (clang has them too), so the compiler allocates registers; there is no assembly.
 *
 * Called through ctypes, which lets go of Python's lock. Nothing here allocates, or knows of Python. Each function that is
 * called takes one struct: a part of the work, whose results no other part touches, so that parts may run at once.
 */
#include <limits.h>
#include <sched.h>
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

/* Rows and columns of B that are packed at once: half a megabyte of the second-level cache. Where A's columns are
 * contiguous, as in a weight's gradient, rows of A would share places of the caches: so a strip of it is packed too,
 * and more columns of B share that. */
#define DEEP 512
#define WIDE 256
#define STRIP 112
#define STRIP_DEEP 384
#define STRIP_WIDE 512
#define PRODUCT_ROOM (STRIP_DEEP * STRIP_WIDE + STRIP_DEEP * STRIP + ROWS * PANEL)

/* Part of a product: c[m, wide] (+)= a[m, deep] times packed panels. The last panel may be wider than c: it goes by edge. */
static AVX512 void strip_product(float *c, size c_row, const float *a, size a_row, size a_col, const float *panels, size m,
                                 size wide, size deep, int add, float *edge) {
    for (size i = 0; i < m; i += ROWS) {
        const size rows = m - i < ROWS ? m - i : ROWS;
        const float *from = a + i * a_row;
        for (size j = 0; j < wide; j += PANEL) {
            float *to = c + i * c_row + j;
            if (wide - j >= PANEL) {
                multiply(to, c_row, from, a_row, a_col, panels + j * deep, rows, deep, add);
                continue;
            }
            multiply(edge, PANEL, from, a_row, a_col, panels + j * deep, rows, deep, 0);
            for (size r = 0; r < rows; r++)
                for (size l = 0; l < wide - j; l++)
                    to[r * c_row + l] = edge[r * PANEL + l] + (add ? to[r * c_row + l] : 0.0f);
        }
    }
}

/* to[deep][STRIP] = a[m, deep], m <= STRIP. */
static AVX512 void pack_strip(float *to, const float *a, size a_row, size a_col, size m, size deep) {
    for (size l = 0; l < deep; l++, to += STRIP, a += a_col)
        if (a_row == 1 && m == STRIP)
            for (size r = 0; r < STRIP; r += LANES) store(to + r, load(a + r));
        else
            for (size r = 0; r < m; r++) to[r] = a[r * a_row];
}

/* c[m, n] = a[m, k] b[k, n], each with its own strides, c's columns next to each other. room: PRODUCT_ROOM floats. */
typedef struct {
    float *c;
    size c_row;
    const float *a;
    size a_row, a_col;
    const float *b;
    size b_row, b_col, m, n, k;
    float *room;
} Product;

AVX512 void peagle_product(const void *part) {
    const Product of = *(const Product *)part;
    const int by_strip = of.a_col != 1;
    const size most_deep = by_strip ? STRIP_DEEP : DEEP, most_wide = by_strip ? STRIP_WIDE : WIDE;
    const size pieces = (of.k + most_deep - 1) / most_deep, step = (of.k + pieces - 1) / pieces;
    float *panels = of.room, *strip = panels + STRIP_DEEP * STRIP_WIDE, *edge = strip + STRIP_DEEP * STRIP;
    for (size left = 0; left < of.n; left += most_wide)
        for (size top = 0; top < of.k; top += step) {
            const size deep = of.k - top < step ? of.k - top : step, wide = of.n - left < most_wide ? of.n - left : most_wide;
            const float *from = of.a + top * of.a_col;
            for (size j = 0; j < wide; j += PANEL)
                pack(panels + j * deep, of.b + top * of.b_row + (left + j) * of.b_col, of.b_row, of.b_col, deep, wide - j);
            if (!by_strip) {
                strip_product(of.c + left, of.c_row, from, of.a_row, 1, panels, of.m, wide, deep, top > 0, edge);
                continue;
            }
            for (size i = 0; i < of.m; i += STRIP) {
                const size rows = of.m - i < STRIP ? of.m - i : STRIP;
                pack_strip(strip, from + i * of.a_row, of.a_row, of.a_col, rows, deep);
                strip_product(of.c + i * of.c_row + left, of.c_row, strip, 1, STRIP, panels, rows, wide, deep, top > 0, edge);
            }
        }
}

/* ---------- elementwise ---------- */

/* exp(x) for x <= 80, within 2 units in the last place; 0 below -87. */
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
    return pick(x < all(-87.0f), (vec){0}, (vec)((ivec)p + exponent)); /* NaN stays */
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

/* 1 / (1 + exp(-x)) */
INLINE vec sigmoid(vec x) {
    const vec t = exponential(pick(x > (vec){0}, -x, x)), one = all(1.0f);
    return pick(x > (vec){0}, one, t) / (one + t);
}

INLINE vec load_some(const float *p, size n) {
    vec found = {0};
    for (size i = 0; i < n; i++) found[i] = p[i];
    return found;
}

INLINE void store_some(float *p, vec x, size n) {
    for (size i = 0; i < n; i++) p[i] = x[i];
}

/* For each vector's worth of n numbers at i: READ(pointer) and WRITE(pointer, x) touch no more than there are. */
#define READ(p) (n - i >= LANES ? load((p) + i) : load_some((p) + i, n - i))
#define WRITE(p, x) (n - i >= LANES ? store((p) + i, x) : store_some((p) + i, x, n - i))

/* n numbers of each. `hidden` is silu(gate) * up, written. Backward: from d loss / d hidden in `grad` also up_grad, and
 * gate's in place of `grad`. */
typedef struct {
    const float *gate, *up;
    float *hidden, *grad, *up_grad;
    size n;
} Swiglu;

AVX512 void peagle_swiglu(const void *part) {
    const Swiglu of = *(const Swiglu *)part;
    const size n = of.n;
    for (size i = 0; i < n; i += LANES) {
        const vec g = READ(of.gate);
        WRITE(of.hidden, g * sigmoid(g) * READ(of.up));
    }
}

AVX512 void peagle_swiglu_backward(const void *part) {
    const Swiglu of = *(const Swiglu *)part;
    const size n = of.n;
    for (size i = 0; i < n; i += LANES) {
        const vec g = READ(of.gate), u = READ(of.up), d = READ(of.grad), s = sigmoid(g), silu = g * s;
        WRITE(of.hidden, silu * u);
        WRITE(of.up_grad, silu * d);
        WRITE(of.grad, d * u * (s + silu * (all(1.0f) - s)));
    }
}

/* Rows of logits x, [m, n]: best, the largest; log_sum of the sum of exp(x); choice, the first place of the largest.
 * With `wanted` (row label[r] of it, a distribution): dot = sum x wanted, and x becomes softmax(x) - wanted. Without:
 * dot = sum x softmax(x), and x becomes softmax(x). x stays as it is unless `is_written`. */
typedef struct {
    float *x;
    size m, n;
    const float *wanted;
    size wanted_row;
    const long long *label;
    size is_written;
    float *best, *log_sum, *dot;
    long long *choice;
} Softmax;

AVX512 void peagle_softmax(const void *part) {
    const Softmax of = *(const Softmax *)part;
    const size n = of.n;
    for (size r = 0; r < of.m; r++) {
        float *x = of.x + r * n;
        const float *want = of.wanted ? of.wanted + of.label[r] * of.wanted_row : NULL;
        vec top[4] = {all(x[0]), all(x[0]), all(x[0]), all(x[0])}, sum[2] = {0}, product[2] = {0};
        size i = 0;
        for (; i + 4 * LANES <= n; i += 4 * LANES)
            for (int j = 0; j < 4; j++) top[j] = larger(load(x + i + j * LANES), top[j]);
        float most = largest_of(larger(larger(top[0], top[1]), larger(top[2], top[3])));
        for (; i < n; i++) most = most > x[i] ? most : x[i];
        if (of.choice) {
            for (i = 0; i < n && !(x[i] >= most);) i++;
            of.choice[r] = i < n ? i : 0;
        }
        for (i = 0; i < n; i += LANES) {
            const vec one = READ(x);
            vec p = exponential(one - all(most));
            if (n - i < LANES)
                for (size j = n - i; j < LANES; j++) p[j] = 0;
            sum[i / LANES % 2] += p;
            product[i / LANES % 2] += one * (want ? READ(want) : p);
            if (of.is_written) WRITE(x, p);
        }
        const float total = sum_of(sum[0] + sum[1]), share = 1.0f / total;
        of.best[r] = most;
        of.log_sum[r] = most + __builtin_logf(total);
        of.dot[r] = sum_of(product[0] + product[1]) * (want ? 1.0f : share);
        if (!of.is_written) continue;
        for (i = 0; i < n; i += LANES) WRITE(x, want ? READ(x) * share - READ(want) : READ(x) * share);
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
 * (with own keys) themselves; mask, [rows, masked], is added to the last columns. Where place is given, queries of one
 * place are equal, 0 <= place < places: keys that no mask touches are then met once for each place. */
typedef struct {
    size own_first, own_last, context_first, context_last, masked, mask_row;
    const float *mask;
    size places;
    const int *place;
} Tile;

/* Heads first_head to last_head of the keys, and the queries of each. Own keys may be missing (data is NULL).
 *
 * Work on a head is a row of turns: each tile with each of the head's query heads, in order. Parts with the same heads
 * share them. turns, [heads, 1 + num_tiles * group] and zero at first, says for each head which turn is the next that
 * nobody took, and how far each turn came. */
typedef struct {
    Tensor q, k, v, own_k, own_v, out, grad;    /* grad: of out, backward only */
    Tensor q_grad, k_grad, v_grad, own_k_grad, own_v_grad; /* written (q) and added to by the backward */
    float *log_sum;                             /* [query heads, queries] */
    const Tile *tiles;
    size num_tiles, num_queries, group, d, first_head, last_head;
    size most_rows, most_keys, is_backward; /* of a tile, of a run of context */
    size *turns;
    float scale;
    float *room; /* peagle_attention_room floats */
} Attention;

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
    const float *k_across, *v_across; /* v_across: backward only */
    const float *along;               /* values in the forward, keys in the backward */
    size start, stop; /* keys to see */
    size held;        /* keys that were packed */
    size column;      /* which column of all scores the first of them is */
} Keys;

/* A block: n keys from `at` of their run on, the first of them in `column` of all scores, of which the mask is added from
 * column `from` on. */
typedef struct {
    size at, n, column, from;
} Block;

/* Panels of a block: keys first to last, where last may be the block's end. */
typedef struct {
    size first, last;
} Part;

INLINE int is_masked(Block block) { return block.column + block.n > block.from; }

/* What num_rows rows see of a block: all but the panels at either end in which the mask hides every key from each. */
static AVX512 Part seen(Block block, const Tile *tile, size row, size num_rows) {
    Part found = {0, 0};
    for (size j = 0; j < block.n; j += PANEL) {
        const size end = j + PANEL < block.n ? j + PANEL : block.n;
        int is_seen = block.column + j < block.from;
        for (size r = row; r < row + num_rows && !is_seen; r++) {
            const float *mask = tile->mask + r * tile->mask_row + block.column - block.from;
            for (size l = j; l < end; l++) is_seen |= mask[l] > -__builtin_inff();
        }
        if (!is_seen) continue;
        if (found.last == 0) found.first = j;
        found.last = end;
    }
    return found;
}

/* scores[rows, part] of a block: queries (or gradients) times keys (or values). */
INLINE void scores_of(float *scores, const float *rows, const float *across, Block block, Part part, size num_rows, size d) {
    for (size j = part.first; j < part.last; j += PANEL)
        multiply(scores + j, SCORES, rows, d, 1, across + (block.at + j) / PANEL * d * PANEL, num_rows, d, 0);
}

/* Add the mask, and nothing but -inf behind the last key. */
INLINE void hide(float *scores, const Tile *tile, size row, size num_rows, Block block, Part part) {
    const size begin = block.from - block.column > part.first ? block.from - block.column : part.first;
    for (size r = 0; r < num_rows; r++) {
        for (size j = begin; j < part.last; j++)
            scores[r * SCORES + j] += tile->mask[(row + r) * tile->mask_row + block.column + j - block.from];
        for (size j = part.last; j < rounded(part.last); j++) scores[r * SCORES + j] = -__builtin_inff();
    }
}

/* Contiguous [rows, d] of one head, times a factor. */
INLINE void gather(float *to, Tensor x, size head, size first, size last, size d, float factor) {
    for (size i = first; i < last; i++, to += d)
        for (size j = 0; j < d; j += LANES) store(to + j, load(x.data + i * x.row + head * x.head + j) * factor);
}

/* The queries of a tile, or the distinct ones among them. */
typedef struct {
    size num_rows;
    float *rows, *found;             /* scaled queries; sums of values, or the queries' gradients: [num_rows, d] */
    float *top, *total;              /* forward: largest score so far, sum of exp(score - that) */
    float *log_sum, *pull;           /* backward: log of the sum of exp(score); see below */
    float *grads;                    /* of the output, [num_rows, d] */
    float *rows_along, *grads_along; /* rows and grads in panels, [d / 64][num_rows][64] */
} Queries;

INLINE Block block_at(const Keys *keys, const Tile *tile, size at, size num_columns) {
    const size n = keys->stop - at < BLOCK ? keys->stop - at : BLOCK;
    return (Block){at, n, keys->column + at - keys->start, num_columns - tile->masked};
}

static AVX512 void forward_run(const Attention *call, const Tile *tile, const Queries *of, const Keys *keys, float *scores,
                               size num_columns) {
    const size d = call->d;
    for (size at = keys->start; at < keys->stop; at += BLOCK) {
        const Block block = block_at(keys, tile, at, num_columns);
        for (size i = 0; i < of->num_rows; i += GROUP) {
            const size here = of->num_rows - i < GROUP ? of->num_rows - i : GROUP;
            const Part part = seen(block, tile, i, here);
            float *found = of->found + i * d;
            scores_of(scores, of->rows + i * d, keys->k_across, block, part, here, d);
            hide(scores, tile, i, here, block, part);
            for (size r = 0; r < here; r++) {
                float *row = scores + r * SCORES;
                const float before = of->top[i + r];
                vec most = all(before), sum = {0};
                for (size j = part.first; j < rounded(part.last); j += LANES) most = larger(load(row + j), most);
                const float now = largest_of(most);
                for (size j = part.first; j < rounded(part.last); j += LANES) {
                    const vec p = exponential(load(row + j) - all(now));
                    store(row + j, p);
                    sum += p;
                }
                if (now > before) {
                    const float fade = exponential(all(before - now))[0];
                    of->total[i + r] *= fade;
                    for (size j = 0; j < d; j += LANES) store(found + r * d + j, load(found + r * d + j) * fade);
                    of->top[i + r] = now;
                }
                of->total[i + r] += sum_of(sum);
            }
            for (size j = 0; j < d; j += PANEL)
                multiply(found + j, d, scores + part.first, SCORES, 1,
                         keys->along + (j / PANEL * keys->held + at + part.first) * PANEL, here, part.last - part.first, 1);
        }
    }
}

/* Where a run's gradients of keys and values go: rows of one head, of which the run's first is `base`. */
typedef struct {
    Tensor k, v;
    size head, base;
} Sinks;

/* sinks of a block's part += scores' transpose (probs: of values; inner: of keys) times num_rows rows of queries from i on. */
static AVX512 void send(const Sinks *sinks, const Queries *of, const float *probs, const float *inner, Block block,
                        Part part, size i, size num_rows, size d) {
    const size first = i * SCORES + part.first, row = sinks->base + block.at + part.first;
    for (size j = 0; j < d; j += PANEL) {
        float *to_k = (float *)sinks->k.data + row * sinks->k.row + sinks->head * sinks->k.head + j;
        float *to_v = (float *)sinks->v.data + row * sinks->v.row + sinks->head * sinks->v.head + j;
        const size from = j * of->num_rows + i * PANEL;
        multiply(to_k, sinks->k.row, inner + first, 1, SCORES, of->rows_along + from, part.last - part.first, num_rows, 1);
        multiply(to_v, sinks->v.row, probs + first, 1, SCORES, of->grads_along + from, part.last - part.first, num_rows, 1);
    }
}

/* Turns of one head add to the same gradients of keys. Each comes to a key after the turn before it, so that sums have
 * one order, however many threads there are: a turn follows the other at the distance of a block. */
typedef struct {
    size *before, *own; /* how far they came, in columns of scores from the first context key of all; before may be NULL */
} Turn;

static void wait_for(const Turn *turn, size until) {
    for (int tries = 1; turn->before && __atomic_load_n(turn->before, __ATOMIC_ACQUIRE) < until; tries++) {
        __builtin_ia32_pause();
        if (tries % 1024 == 0) sched_yield();
    }
}

static void came_to(const Turn *turn, size where) { __atomic_store_n(turn->own, where, __ATOMIC_RELEASE); }

/* Gradients of one run of keys. */
static AVX512 void backward_run(const Attention *call, const Tile *tile, const Queries *of, const Keys *keys,
                                const Sinks *sinks, const Turn *turn, float *probs, float *inner, size num_columns) {
    const size d = call->d;
    for (size at = keys->start; at < keys->stop; at += BLOCK) {
        const Block block = block_at(keys, tile, at, num_columns);
        const size end = tile->context_first + block.column + block.n;
        wait_for(turn, end);
        for (size i = 0; i < of->num_rows; i += GROUP) {
            const size here = of->num_rows - i < GROUP ? of->num_rows - i : GROUP;
            const Part part = seen(block, tile, i, here);
            float *p = probs + i * SCORES, *g = inner + i * SCORES;
            scores_of(p, of->rows + i * d, keys->k_across, block, part, here, d);
            hide(p, tile, i, here, block, part);
            scores_of(g, of->grads + i * d, keys->v_across, block, part, here, d);
            for (size r = 0; r < here; r++)
                for (size j = part.first; j < rounded(part.last); j += LANES) {
                    const vec one = exponential(load(p + r * SCORES + j) - all(of->log_sum[i + r]));
                    store(p + r * SCORES + j, one);
                    store(g + r * SCORES + j, one * (load(g + r * SCORES + j) - all(of->pull[i + r])));
                }
            for (size j = 0; j < d; j += PANEL)
                multiply(of->found + i * d + j, d, g + part.first, SCORES, 1,
                         keys->along + (j / PANEL * keys->held + at + part.first) * PANEL, here, part.last - part.first, 1);
            if (is_masked(block)) send(sinks, of, probs, inner, block, part, i, here, d);
        }
        /* Rows that see the same keys go together: the more, the less often a gradient is read and written. */
        if (!is_masked(block)) send(sinks, of, probs, inner, block, (Part){0, block.n}, 0, of->num_rows, d);
        came_to(turn, end);
    }
}

static AVX512 void along(const Queries *of, size d) {
    for (size j = 0; j < d; j += PANEL) {
        pack(of->rows_along + j * of->num_rows, of->rows + j, d, 1, of->num_rows, PANEL);
        pack(of->grads_along + j * of->num_rows, of->grads + j, d, 1, of->num_rows, PANEL);
    }
}

static AVX512 void clear(float *x, size n, float to) {
    for (size i = 0; i < n; i++) x[i] = to;
}

/* The distinct queries of a tile. Backward: rows of one place have the same scores s and differ in their log_sum l and
 * gradient g, so that with m their smallest l and w = exp(m - l) they act as one row whose probabilities are exp(s - m),
 * whose gradient is the sum of w g, and whose pull the sum of w pull. */
static AVX512 void distinct(const Tile *tile, const Queries *from, const Queries *to, size d, int is_backward) {
    for (size r = 0; r < from->num_rows; r++)
        for (size j = 0; j < d; j += LANES) store(to->rows + tile->place[r] * d + j, load(from->rows + r * d + j));
    if (!is_backward) return;
    clear(to->log_sum, to->num_rows, -LOWEST);
    clear(to->pull, to->num_rows, 0);
    clear(to->grads, to->num_rows * d, 0);
    for (size r = 0; r < from->num_rows; r++) {
        float *least = to->log_sum + tile->place[r];
        if (from->log_sum[r] < *least) *least = from->log_sum[r];
    }
    for (size r = 0; r < from->num_rows; r++) {
        const size u = tile->place[r];
        const float share = exponential(all(to->log_sum[u] - from->log_sum[r]))[0];
        to->pull[u] += share * from->pull[r];
        for (size j = 0; j < d; j += LANES)
            store(to->grads + u * d + j, load(to->grads + u * d + j) + share * load(from->grads + r * d + j));
    }
}

static AVX512 float *put(float **room, size n) {
    float *found = *room;
    *room += (n + LANES - 1) / LANES * LANES;
    return found;
}

static AVX512 Queries queries(float **room, size most_rows, size d, int is_backward) {
    Queries found = {0};
    found.rows = put(room, most_rows * d), found.found = put(room, most_rows * d);
    if (!is_backward) {
        found.top = put(room, most_rows), found.total = put(room, most_rows);
        return found;
    }
    found.log_sum = put(room, most_rows), found.pull = put(room, most_rows), found.grads = put(room, most_rows * d);
    found.rows_along = put(room, most_rows * d), found.grads_along = put(room, most_rows * d);
    return found;
}

/* Floats of room that a call needs: most_rows of a tile, most_keys of a run of context. */
AVX512 size peagle_attention_room(size most_rows, size most_keys, size d, int is_backward) {
    const size keys = rounded(most_keys) * d, own = rounded(most_rows) * d, spare = 32 * LANES;
    if (!is_backward) return 2 * keys + 2 * own + GROUP * SCORES + 4 * most_rows * (d + 1) + spare;
    return 3 * keys + 3 * own + 2 * most_rows * SCORES + 2 * most_rows * (5 * d + 2) + spare;
}

static AVX512 void forward_tile(const Attention *call, const Tile *tile, size q, Queries *of, Queries *few,
                                const Keys *context, const Keys *own, size apart, float *scores) {
    const size d = call->d, num_columns = context->stop + (own ? of->num_rows : 0);
    Keys rest = *context;
    clear(of->found, of->num_rows * d, 0), clear(of->top, of->num_rows, LOWEST), clear(of->total, of->num_rows, 0);
    if (apart > 0) {
        Keys shared = *context;
        shared.stop = rest.start = rest.column = apart;
        distinct(tile, of, few, d, 0);
        clear(few->found, few->num_rows * d, 0), clear(few->top, few->num_rows, LOWEST);
        clear(few->total, few->num_rows, 0);
        forward_run(call, tile, few, &shared, scores, num_columns);
        for (size r = 0; r < of->num_rows; r++) {
            const size u = tile->place[r];
            of->top[r] = few->top[u], of->total[r] = few->total[u];
            for (size j = 0; j < d; j += LANES) store(of->found + r * d + j, load(few->found + u * d + j));
        }
    }
    forward_run(call, tile, of, &rest, scores, num_columns);
    if (own) forward_run(call, tile, of, own, scores, num_columns);
    for (size i = 0; i < of->num_rows; i++) {
        float *to = (float *)call->out.data + (tile->own_first + i) * call->out.row + q * call->out.head;
        const float share = 1.0f / of->total[i];
        for (size j = 0; j < d; j += LANES) store(to + j, load(of->found + i * d + j) * share);
        call->log_sum[q * call->num_queries + tile->own_first + i] = of->top[i] + __builtin_logf(of->total[i]);
    }
}

static AVX512 void backward_tile(const Attention *call, const Tile *tile, size q, const Turn *turn, Queries *of, Queries *few,
                                 const Keys *context, const Keys *own, size apart, float *probs, float *inner) {
    const size d = call->d, head = q / call->group, num_columns = context->stop + (own ? of->num_rows : 0);
    const Sinks sinks = {call->k_grad, call->v_grad, head, tile->context_first};
    const Sinks own_sinks = {call->own_k_grad, call->own_v_grad, head, tile->own_first};
    Keys rest = *context;
    gather(of->grads, call->grad, q, tile->own_first, tile->own_last, d, 1.0f);
    clear(of->found, of->num_rows * d, 0);
    /* d loss / d scores = probs * (d loss / d probs - pull), pull = sum over keys of probs * d loss / d probs */
    for (size i = 0; i < of->num_rows; i++) {
        const float *out = call->out.data + (tile->own_first + i) * call->out.row + q * call->out.head;
        vec sum = {0};
        for (size j = 0; j < d; j += LANES) sum += load(of->grads + i * d + j) * load(out + j);
        of->pull[i] = sum_of(sum);
        of->log_sum[i] = call->log_sum[q * call->num_queries + tile->own_first + i];
    }
    if (apart > 0) {
        Keys shared = *context;
        shared.stop = rest.start = rest.column = apart;
        distinct(tile, of, few, d, 1);
        clear(few->found, few->num_rows * d, 0);
        along(few, d);
        backward_run(call, tile, few, &shared, &sinks, turn, probs, inner, num_columns);
        /* Equal queries come from one tensor, which gets the sum of their gradients: the last of them brings it. */
        for (size r = of->num_rows; r-- > 0;) {
            float *from = few->found + tile->place[r] * d;
            for (size j = 0; j < d; j += LANES) store(of->found + r * d + j, load(from + j)), store(from + j, (vec){0});
        }
    }
    along(of, d);
    backward_run(call, tile, of, &rest, &sinks, turn, probs, inner, num_columns);
    if (own) backward_run(call, tile, of, own, &own_sinks, turn, probs, inner, num_columns);
    for (size i = 0; i < of->num_rows; i++) {
        float *to = (float *)call->q_grad.data + (tile->own_first + i) * call->q_grad.row + q * call->q_grad.head;
        for (size j = 0; j < d; j += LANES) store(to + j, load(of->found + i * d + j) * call->scale);
    }
}

AVX512 void peagle_attention(const void *part) {
    const Attention *call = part;
    const size d = call->d, most_rows = call->most_rows, most_keys = call->most_keys;
    const int is_backward = call->is_backward;
    float *room = call->room;
    float *k_across = put(&room, rounded(most_keys) * d), *read_along = put(&room, rounded(most_keys) * d);
    float *own_k_across = put(&room, rounded(most_rows) * d), *own_along = put(&room, rounded(most_rows) * d);
    float *v_across = is_backward ? put(&room, rounded(most_keys) * d) : NULL;
    float *own_v_across = is_backward ? put(&room, rounded(most_rows) * d) : NULL;
    float *scores = put(&room, (is_backward ? most_rows : GROUP) * SCORES);
    float *inner = is_backward ? put(&room, most_rows * SCORES) : NULL;
    Queries of = queries(&room, most_rows, d, is_backward), few = queries(&room, most_rows, d, is_backward);
    /* The backward multiplies by keys, the forward by values. */
    const Tensor read = is_backward ? call->k : call->v, own_read = is_backward ? call->own_k : call->own_v;
    const int has_own = call->own_k.data != NULL;

    for (size head = call->first_head; head < call->last_head; head++) {
        const size num_turns = call->num_tiles * call->group;
        size *next = call->turns + head * (num_turns + 1), *came = next + 1;
        size packed_first = 0, packed_last = -1, packed_own = -1, i;
        while ((i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < num_turns) {
            const size t = i / call->group, q = head * call->group + i % call->group;
            const Tile *tile = call->tiles + t;
            const size first = tile->own_first, last = tile->own_last, length = tile->context_last - tile->context_first;
            if (tile->context_first != packed_first || tile->context_last > packed_last) {
                packed_first = tile->context_first, packed_last = tile->context_last;
                for (size u = t + 1; u < call->num_tiles && call->tiles[u].context_first == packed_first; u++)
                    if (call->tiles[u].context_last > packed_last) packed_last = call->tiles[u].context_last;
                pack_across(k_across, call->k, head, packed_first, packed_last, d);
                pack_along(read_along, read, head, packed_first, packed_last, d);
                if (is_backward) pack_across(v_across, call->v, head, packed_first, packed_last, d);
            }
            if (has_own && t != packed_own) {
                packed_own = t;
                pack_across(own_k_across, call->own_k, head, first, last, d);
                pack_along(own_along, own_read, head, first, last, d);
                if (is_backward) pack_across(own_v_across, call->own_v, head, first, last, d);
            }
            of.num_rows = last - first, few.num_rows = tile->places;
            const Keys context = {k_across, v_across, read_along, 0, length, packed_last - packed_first, 0};
            const Keys own = {own_k_across, own_v_across, own_along, 0, last - first, last - first, length};
            const size unmasked = length - (tile->masked - (has_own ? last - first : 0));
            const size apart = tile->place != NULL && unmasked > 0 ? unmasked / PANEL * PANEL : 0;
            gather(of.rows, call->q, q, first, last, d, call->scale);
            if (!is_backward) {
                forward_tile(call, tile, q, &of, &few, &context, has_own ? &own : NULL, apart, scores);
                continue;
            }
            const Turn turn = {i > 0 ? came + i - 1 : NULL, came + i};
            backward_tile(call, tile, q, &turn, &of, &few, &context, has_own ? &own : NULL, apart, scores, inner);
            wait_for(&turn, LONG_MAX); /* whoever waits for this one need not look at the one before it */
            came_to(&turn, LONG_MAX);
        }
    }
}

/* ---------- threads ---------- */

/* GOMP_parallel of the OpenMP library that PyTorch uses: runs a function in each of its threads. Its threads spin for a
 * while once they have nothing to do, so threads of our own would fight with them for the cores. */
typedef void (*Parallel)(void (*run)(void *), void *data, unsigned num_threads, unsigned flags);

typedef struct {
    void (*solve)(const void *);
    const char *parts;
    size part_size, num_parts, next;
} Shared;

static void take_parts(void *data) {
    Shared *of = data;
    size i;
    while ((i = __atomic_fetch_add(&of->next, 1, __ATOMIC_RELAXED)) < of->num_parts) of->solve(of->parts + i * of->part_size);
}

/* Solve parts that lie part_size bytes apart, in as many threads as PyTorch has. */
void peagle_share(Parallel parallel, void (*solve)(const void *), const void *parts, size part_size, size num_parts) {
    Shared of = {solve, parts, part_size, num_parts, 0};
    parallel(take_parts, &of, 0, 0);
}

int peagle_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

size peagle_product_room(void) { return PRODUCT_ROOM; }

#else

int peagle_supported(void) { return 0; }

#endif
