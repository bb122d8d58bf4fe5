/* Attention forward and backward, and softmax with the gradient of its loss, in float32: what PyTorch's CPU library does in
 * several products and as many passes over memory.
 *
 * The attention is one micro-kernel: ROWS rows by PANEL columns of a result stay in registers while one row of B meets one
 * number of each of the rows of A, so B is packed into panels of PANEL columns. Vectors are GCC's (clang has them too): the
 * compiler allocates registers, there is no assembly. Built twice, for AVX2 and for AVX-512; PyTorch says which one to load.
 *
 * Called through ctypes, which releases Python's lock. Nothing here allocates, or knows of Python. Each function takes one
 * struct: a part of the work, which may run beside the other parts.
 */
#include <limits.h>
#include <sched.h>
#include <stddef.h>

#if defined(__AVX512F__) /* 32 registers: 28 sums, 4 of B */
#define LANES 16
#define PANEL 64
#define ROWS 7
#define GROUP 28 /* rows that go through softmax while they are in the nearest cache */
#elif defined(__AVX2__) && defined(__FMA__) /* 16 registers: 12 sums, 2 of B, 1 of A */
#define LANES 8
#define PANEL 16
#define ROWS 6
#define GROUP 30
#else
#error "needs AVX2 and FMA, or AVX-512"
#endif
#define VECTORS (PANEL / LANES)

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef ptrdiff_t size;

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec x) { *(vec *)p = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec pick(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return pick(a > b, a, b); }

INLINE float sum_of(vec x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

INLINE float max_of(vec x) {
    float max = x[0];
    for (int i = 1; i < LANES; i++) max = max > x[i] ? max : x[i];
    return max;
}

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

/* ---------- matrix products ---------- */

/* c[m, PANEL] = (add ? c : 0) + a[m, k] b[k, PANEL]; a's numbers lie a_row and a_col apart, b's rows PANEL. */
INLINE void micro_kernel(int m, float *c, size c_row, const float *a, size a_row, size a_col, const float *b, size k,
                         int add) {
    vec sum[ROWS][VECTORS];
    for (int r = 0; r < m; r++)
        for (int j = 0; j < VECTORS; j++) sum[r][j] = add ? load(c + r * c_row + j * LANES) : (vec){0};
    for (size i = 0; i < k; i++) {
        vec row[VECTORS];
        for (int j = 0; j < VECTORS; j++) row[j] = load(b + i * PANEL + j * LANES);
        for (int r = 0; r < m; r++) {
            const float one = a[r * a_row + i * a_col];
            for (int j = 0; j < VECTORS; j++) sum[r][j] += one * row[j];
        }
    }
    for (int r = 0; r < m; r++)
        for (int j = 0; j < VECTORS; j++) store(c + r * c_row + j * LANES, sum[r][j]);
}

#define CASE(m) case m: micro_kernel(m, c, c_row, a, a_row, a_col, b, k, add); break

/* The same for any number of rows. */
static void multiply(float *c, size c_row, const float *a, size a_row, size a_col, const float *b, size m, size k, int add) {
    for (; m > 0; m -= ROWS, c += ROWS * c_row, a += ROWS * a_row) switch (m < ROWS ? m : ROWS) {
            CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6);
#if ROWS == 7
            CASE(7);
#endif
        }
}

/* panel[k, PANEL] = b[k, n], whose rows and columns lie `row` and `col` apart; columns from n on become zero. */
static void pack(float *panel, const float *b, size row, size col, size k, size n) {
    if (col == 1 && n >= PANEL) {
        for (size i = 0; i < k; i++)
            for (int j = 0; j < VECTORS; j++) store(panel + i * PANEL + j * LANES, load(b + i * row + j * LANES));
        return;
    }
    for (size i = 0; i < k; i++)
        for (size j = 0; j < PANEL; j++) panel[i * PANEL + j] = j < n ? b[i * row + j * col] : 0.0f;
}

/* ---------- attention ---------- */

#define BLOCK 256           /* keys whose scores are formed at a time */
#define SCORES (BLOCK + 16) /* a row of scores: not a power of two, or its columns would compete for cache lines */
#define LOWEST -1e30f       /* stands for the largest score of a row that saw no key yet */

/* Tensors are given by their strides; the d numbers of a head lie together. */
typedef struct { const float *data; size row, head; } Tensor;

/* Queries that are solved together: rows own_first to own_last see the context's keys context_first to context_last and
 * (with own keys) themselves; mask, [rows, num_masked], is added to the last columns. Where distinct_id is given, queries
 * with the same id are equal, 0 <= id < num_distinct: keys that no mask touches are then met once for each id. */
typedef struct {
    size own_first, own_last, context_first, context_last, num_masked, mask_row;
    const float *mask;
    size num_distinct;
    const int *distinct_id;
} Tile;

/* Key heads first_head to last_head, and the query heads of each. Own keys may be missing (data is NULL).
 *
 * Work on a head is a row of turns: each tile with each of the head's query heads, in order. Parts with the same heads
 * share them. turns, [heads, 1 + num_tiles * group] and zero at first, says for each head which turn is the next that
 * nobody took, and how far each turn is. */
typedef struct {
    Tensor q, k, v, own_k, own_v, out, grad;               /* grad: of out, backward only */
    Tensor q_grad, k_grad, v_grad, own_k_grad, own_v_grad; /* written (q) and added to by the backward */
    float *log_sum;                                        /* [query heads, queries] */
    const Tile *tiles;
    size num_tiles, num_queries, group, d, first_head, last_head;
    size max_rows, max_keys, is_backward; /* of a tile, of a run of context */
    size *turns;
    float scale;
    float *workspace; /* peagle_attention_workspace floats */
} Attention;

INLINE size rounded(size n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* Keys of one head, packed: `across` [keys / PANEL][d][PANEL] for products with keys' transpose, `along`
 * [d / PANEL][keys][PANEL]. */
static void pack_across(float *to, Tensor x, size head, size first, size last, size d) {
    for (size i = first; i < last; i += PANEL, to += d * PANEL)
        pack(to, x.data + i * x.row + head * x.head, 1, x.row, d, last - i);
}

static void pack_along(float *to, Tensor x, size head, size first, size last, size d) {
    for (size j = 0; j < d; j += PANEL, to += (last - first) * PANEL)
        pack(to, x.data + first * x.row + head * x.head + j, x.row, 1, last - first, PANEL);
}

/* A run of keys of one head, and where their gradients go. */
typedef struct {
    const float *k_across, *v_across; /* v_across: backward only */
    const float *along;               /* values in the forward, keys in the backward */
    size start, stop;                 /* keys to see */
    size num_packed;
    size column;           /* which column of all scores the first of them is */
    float *k_grad, *v_grad; /* backward only: of the run's first key, and from one key to the next */
    size k_grad_row, v_grad_row;
} Keys;

/* A block: n keys from `at` of their run on, the first of them in `column` of all scores, of which the mask is added from
 * column `masked_from` on. */
typedef struct { size at, n, column, masked_from; } Block;

/* Panels of a block: keys first to last, where last may be the block's end. */
typedef struct { size first, last; } Part;

INLINE int is_masked(Block block) { return block.column + block.n > block.masked_from; }

/* What num_rows rows see of a block: all but the panels at either end in which the mask hides every key from each. */
static Part visible(Block block, const Tile *tile, size row, size num_rows) {
    Part part = {0, 0};
    for (size j = 0; j < block.n; j += PANEL) {
        const size end = j + PANEL < block.n ? j + PANEL : block.n;
        int is_seen = block.column + j < block.masked_from;
        for (size r = row; r < row + num_rows && !is_seen; r++) {
            const float *mask = tile->mask + r * tile->mask_row + block.column - block.masked_from;
            for (size l = j; l < end; l++) is_seen |= mask[l] > -__builtin_inff();
        }
        if (!is_seen) continue;
        if (part.last == 0) part.first = j;
        part.last = end;
    }
    return part;
}

/* scores[rows, part] of a block: queries (or gradients) times keys (or values). */
INLINE void score(float *scores, const float *rows, const float *across, Block block, Part part, size num_rows, size d) {
    for (size j = part.first; j < part.last; j += PANEL)
        multiply(scores + j, SCORES, rows, d, 1, across + (block.at + j) / PANEL * d * PANEL, num_rows, d, 0);
}

/* Add the mask, and nothing but -inf behind the last key. */
INLINE void add_mask(float *scores, const Tile *tile, size row, size num_rows, Block block, Part part) {
    const size begin = block.masked_from - block.column > part.first ? block.masked_from - block.column : part.first;
    for (size r = 0; r < num_rows; r++) {
        const float *mask = tile->mask + (row + r) * tile->mask_row + block.column - block.masked_from;
        for (size j = begin; j < part.last; j++) scores[r * SCORES + j] += mask[j];
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
    float *rows, *sum;               /* scaled queries; sums of values, or the queries' gradients: [num_rows, d] */
    float *row_max, *row_sum;        /* forward: largest score so far, sum of exp(score - that) */
    float *log_sum, *delta;          /* backward: log of the sum of exp(score); sum of out * grad */
    float *grads;                    /* of the output, [num_rows, d] */
    float *rows_along, *grads_along; /* rows and grads in panels, [d / PANEL][num_rows][PANEL] */
} Queries;

INLINE Block block_at(const Keys *keys, const Tile *tile, size at, size num_columns) {
    const size n = keys->stop - at < BLOCK ? keys->stop - at : BLOCK;
    return (Block){at, n, keys->column + at - keys->start, num_columns - tile->num_masked};
}

static void forward_run(const Tile *tile, const Queries *of, const Keys *keys, float *scores, size num_columns, size d) {
    for (size at = keys->start; at < keys->stop; at += BLOCK) {
        const Block block = block_at(keys, tile, at, num_columns);
        for (size i = 0; i < of->num_rows; i += GROUP) {
            const size num_rows = of->num_rows - i < GROUP ? of->num_rows - i : GROUP;
            const Part part = visible(block, tile, i, num_rows);
            float *sums = of->sum + i * d;
            score(scores, of->rows + i * d, keys->k_across, block, part, num_rows, d);
            add_mask(scores, tile, i, num_rows, block, part);
            for (size r = 0; r < num_rows; r++) {
                float *row = scores + r * SCORES;
                const float before = of->row_max[i + r];
                vec max = all(before), sum = {0};
                for (size j = part.first; j < rounded(part.last); j += LANES) max = larger(load(row + j), max);
                const float now = max_of(max);
                for (size j = part.first; j < rounded(part.last); j += LANES) {
                    const vec p = exponential(load(row + j) - all(now));
                    store(row + j, p);
                    sum += p;
                }
                if (now > before) {
                    const float fade = exponential(all(before - now))[0];
                    of->row_sum[i + r] *= fade;
                    for (size j = 0; j < d; j += LANES) store(sums + r * d + j, load(sums + r * d + j) * fade);
                    of->row_max[i + r] = now;
                }
                of->row_sum[i + r] += sum_of(sum);
            }
            for (size j = 0; j < d; j += PANEL)
                multiply(sums + j, d, scores + part.first, SCORES, 1,
                         keys->along + (j / PANEL * keys->num_packed + at + part.first) * PANEL, num_rows,
                         part.last - part.first, 1);
        }
    }
}

/* Gradients of a block's keys and values += scores' transpose (inner: of keys, probs: of values) times num_rows queries
 * from i on. */
static void add_key_grads(const Keys *keys, const Queries *of, const float *probs, const float *inner, Block block, Part part,
                          size i, size num_rows, size d) {
    const size from = i * SCORES + part.first, row = block.at + part.first, m = part.last - part.first;
    for (size j = 0; j < d; j += PANEL) {
        const size along = j * of->num_rows + i * PANEL;
        multiply(keys->k_grad + row * keys->k_grad_row + j, keys->k_grad_row, inner + from, 1, SCORES,
                 of->rows_along + along, m, num_rows, 1);
        multiply(keys->v_grad + row * keys->v_grad_row + j, keys->v_grad_row, probs + from, 1, SCORES,
                 of->grads_along + along, m, num_rows, 1);
    }
}

/* Turns of one head add to the same gradients of keys. Each comes to a key after the turn before it, so that sums have
 * one order, however many threads there are: a turn follows the other at the distance of a block. */
typedef struct { size *before, *own; } Turn; /* progress in columns of scores from key 0 on; before may be NULL */

static void wait_for(const Turn *turn, size until) {
    for (int tries = 1; turn->before && __atomic_load_n(turn->before, __ATOMIC_ACQUIRE) < until; tries++) {
        __builtin_ia32_pause();
        if (tries % 1024 == 0) sched_yield();
    }
}

static void advance(const Turn *turn, size to) { __atomic_store_n(turn->own, to, __ATOMIC_RELEASE); }

static void backward_run(const Tile *tile, const Queries *of, const Keys *keys, const Turn *turn, float *probs, float *inner,
                         size num_columns, size d) {
    for (size at = keys->start; at < keys->stop; at += BLOCK) {
        const Block block = block_at(keys, tile, at, num_columns);
        const size end = tile->context_first + block.column + block.n;
        wait_for(turn, end);
        for (size i = 0; i < of->num_rows; i += GROUP) {
            const size num_rows = of->num_rows - i < GROUP ? of->num_rows - i : GROUP;
            const Part part = visible(block, tile, i, num_rows);
            float *p = probs + i * SCORES, *g = inner + i * SCORES;
            score(p, of->rows + i * d, keys->k_across, block, part, num_rows, d);
            add_mask(p, tile, i, num_rows, block, part);
            score(g, of->grads + i * d, keys->v_across, block, part, num_rows, d);
            for (size r = 0; r < num_rows; r++)
                for (size j = part.first; j < rounded(part.last); j += LANES) {
                    const vec one = exponential(load(p + r * SCORES + j) - all(of->log_sum[i + r]));
                    store(p + r * SCORES + j, one);
                    store(g + r * SCORES + j, one * (load(g + r * SCORES + j) - all(of->delta[i + r])));
                }
            for (size j = 0; j < d; j += PANEL)
                multiply(of->sum + i * d + j, d, g + part.first, SCORES, 1,
                         keys->along + (j / PANEL * keys->num_packed + at + part.first) * PANEL, num_rows,
                         part.last - part.first, 1);
            if (is_masked(block)) add_key_grads(keys, of, probs, inner, block, part, i, num_rows, d);
        }
        /* Rows that see the same keys go together: the more, the less often a gradient is read and written. */
        if (!is_masked(block)) add_key_grads(keys, of, probs, inner, block, (Part){0, block.n}, 0, of->num_rows, d);
        advance(turn, end);
    }
}

static void pack_queries(const Queries *of, size d) {
    for (size j = 0; j < d; j += PANEL) {
        pack(of->rows_along + j * of->num_rows, of->rows + j, d, 1, of->num_rows, PANEL);
        pack(of->grads_along + j * of->num_rows, of->grads + j, d, 1, of->num_rows, PANEL);
    }
}

static void fill(float *x, size n, float value) {
    for (size i = 0; i < n; i++) x[i] = value;
}

/* The distinct queries of a tile. Backward: equal rows have the same scores s and differ in their log_sum l and gradient g,
 * so that with m their smallest l and w = exp(m - l) they act as one row whose probabilities are exp(s - m), whose gradient
 * is the sum of w g, and whose delta the sum of w delta. */
static void merge_equal(const Tile *tile, const Queries *from, const Queries *to, size d, int is_backward) {
    fill(to->sum, to->num_rows * d, 0);
    for (size r = 0; r < from->num_rows; r++)
        for (size j = 0; j < d; j += LANES) store(to->rows + tile->distinct_id[r] * d + j, load(from->rows + r * d + j));
    if (!is_backward) {
        fill(to->row_max, to->num_rows, LOWEST), fill(to->row_sum, to->num_rows, 0);
        return;
    }
    fill(to->log_sum, to->num_rows, -LOWEST), fill(to->delta, to->num_rows, 0), fill(to->grads, to->num_rows * d, 0);
    for (size r = 0; r < from->num_rows; r++) {
        float *least = to->log_sum + tile->distinct_id[r];
        if (from->log_sum[r] < *least) *least = from->log_sum[r];
    }
    for (size r = 0; r < from->num_rows; r++) {
        const size u = tile->distinct_id[r];
        const float share = exponential(all(to->log_sum[u] - from->log_sum[r]))[0];
        to->delta[u] += share * from->delta[r];
        for (size j = 0; j < d; j += LANES)
            store(to->grads + u * d + j, load(to->grads + u * d + j) + share * load(from->grads + r * d + j));
    }
}

static float *take(float **workspace, size n) {
    float *start = *workspace;
    *workspace += (n + LANES - 1) / LANES * LANES;
    return start;
}

static Queries take_queries(float **workspace, size max_rows, size d, int is_backward) {
    Queries of = {0};
    of.rows = take(workspace, max_rows * d), of.sum = take(workspace, max_rows * d);
    if (!is_backward) {
        of.row_max = take(workspace, max_rows), of.row_sum = take(workspace, max_rows);
        return of;
    }
    of.log_sum = take(workspace, max_rows), of.delta = take(workspace, max_rows), of.grads = take(workspace, max_rows * d);
    of.rows_along = take(workspace, max_rows * d), of.grads_along = take(workspace, max_rows * d);
    return of;
}

/* Floats of workspace that a call needs: max_rows of a tile, max_keys of a run of context. */
size peagle_attention_workspace(size max_rows, size max_keys, size d, int is_backward) {
    const size keys = rounded(max_keys) * d, own = rounded(max_rows) * d, spare = 32 * LANES;
    if (!is_backward) return 2 * keys + 2 * own + GROUP * SCORES + 4 * max_rows * (d + 1) + spare;
    return 3 * keys + 3 * own + 2 * max_rows * SCORES + 2 * max_rows * (5 * d + 2) + spare;
}

static void forward_tile(const Attention *call, const Tile *tile, size q, Queries *of, Queries *distinct, const Keys *context,
                         const Keys *own, size num_shared, float *scores) {
    const size d = call->d, num_columns = context->stop + (own ? of->num_rows : 0);
    Keys rest = *context;
    fill(of->sum, of->num_rows * d, 0), fill(of->row_max, of->num_rows, LOWEST), fill(of->row_sum, of->num_rows, 0);
    if (num_shared > 0) {
        Keys shared = *context;
        shared.stop = rest.start = rest.column = num_shared;
        merge_equal(tile, of, distinct, d, 0);
        forward_run(tile, distinct, &shared, scores, num_columns, d);
        for (size r = 0; r < of->num_rows; r++) {
            const size u = tile->distinct_id[r];
            of->row_max[r] = distinct->row_max[u], of->row_sum[r] = distinct->row_sum[u];
            for (size j = 0; j < d; j += LANES) store(of->sum + r * d + j, load(distinct->sum + u * d + j));
        }
    }
    forward_run(tile, of, &rest, scores, num_columns, d);
    if (own) forward_run(tile, of, own, scores, num_columns, d);
    for (size i = 0; i < of->num_rows; i++) {
        float *to = (float *)call->out.data + (tile->own_first + i) * call->out.row + q * call->out.head;
        const float share = 1.0f / of->row_sum[i];
        for (size j = 0; j < d; j += LANES) store(to + j, load(of->sum + i * d + j) * share);
        call->log_sum[q * call->num_queries + tile->own_first + i] = of->row_max[i] + __builtin_logf(of->row_sum[i]);
    }
}

static void backward_tile(const Attention *call, const Tile *tile, size q, const Turn *turn, Queries *of, Queries *distinct,
                          const Keys *context, const Keys *own, size num_shared, float *probs, float *inner) {
    const size d = call->d, num_columns = context->stop + (own ? of->num_rows : 0);
    Keys rest = *context;
    gather(of->grads, call->grad, q, tile->own_first, tile->own_last, d, 1.0f);
    fill(of->sum, of->num_rows * d, 0);
    /* d loss / d scores = probs * (d loss / d probs - delta), delta = sum over keys of probs * d loss / d probs */
    for (size i = 0; i < of->num_rows; i++) {
        const float *out = call->out.data + (tile->own_first + i) * call->out.row + q * call->out.head;
        vec sum = {0};
        for (size j = 0; j < d; j += LANES) sum += load(of->grads + i * d + j) * load(out + j);
        of->delta[i] = sum_of(sum);
        of->log_sum[i] = call->log_sum[q * call->num_queries + tile->own_first + i];
    }
    if (num_shared > 0) {
        Keys shared = *context;
        shared.stop = rest.start = rest.column = num_shared;
        merge_equal(tile, of, distinct, d, 1);
        pack_queries(distinct, d);
        backward_run(tile, distinct, &shared, turn, probs, inner, num_columns, d);
        /* Equal queries come from one tensor, which gets the sum of their gradients: the last of them brings it. */
        for (size r = of->num_rows; r-- > 0;) {
            float *from = distinct->sum + tile->distinct_id[r] * d;
            for (size j = 0; j < d; j += LANES) store(of->sum + r * d + j, load(from + j)), store(from + j, (vec){0});
        }
    }
    pack_queries(of, d);
    backward_run(tile, of, &rest, turn, probs, inner, num_columns, d);
    if (own) backward_run(tile, of, own, turn, probs, inner, num_columns, d);
    for (size i = 0; i < of->num_rows; i++) {
        float *to = (float *)call->q_grad.data + (tile->own_first + i) * call->q_grad.row + q * call->q_grad.head;
        for (size j = 0; j < d; j += LANES) store(to + j, load(of->sum + i * d + j) * call->scale);
    }
}

INLINE float *row_of(Tensor x, size head, size row) {
    return x.data ? (float *)x.data + head * x.head + row * x.row : NULL;
}

void peagle_attention(const void *part) {
    const Attention *call = part;
    const size d = call->d, max_rows = call->max_rows, max_keys = call->max_keys;
    const int is_backward = call->is_backward;
    float *workspace = call->workspace;
    float *k_across = take(&workspace, rounded(max_keys) * d), *along = take(&workspace, rounded(max_keys) * d);
    float *own_k_across = take(&workspace, rounded(max_rows) * d), *own_along = take(&workspace, rounded(max_rows) * d);
    float *v_across = is_backward ? take(&workspace, rounded(max_keys) * d) : NULL;
    float *own_v_across = is_backward ? take(&workspace, rounded(max_rows) * d) : NULL;
    float *scores = take(&workspace, (is_backward ? max_rows : GROUP) * SCORES);
    float *inner = is_backward ? take(&workspace, max_rows * SCORES) : NULL;
    Queries of = take_queries(&workspace, max_rows, d, is_backward);
    Queries distinct = take_queries(&workspace, max_rows, d, is_backward);
    /* The backward multiplies by keys, the forward by values. */
    const Tensor read = is_backward ? call->k : call->v, own_read = is_backward ? call->own_k : call->own_v;
    const int has_own = call->own_k.data != NULL;

    for (size head = call->first_head; head < call->last_head; head++) {
        const size num_turns = call->num_tiles * call->group;
        size *next = call->turns + head * (num_turns + 1), *progress = next + 1;
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
                pack_along(along, read, head, packed_first, packed_last, d);
                if (is_backward) pack_across(v_across, call->v, head, packed_first, packed_last, d);
            }
            if (has_own && t != packed_own) {
                packed_own = t;
                pack_across(own_k_across, call->own_k, head, first, last, d);
                pack_along(own_along, own_read, head, first, last, d);
                if (is_backward) pack_across(own_v_across, call->own_v, head, first, last, d);
            }
            of.num_rows = last - first, distinct.num_rows = tile->num_distinct;
            const Keys context = {k_across, v_across, along, 0, length, packed_last - packed_first, 0,
                                  row_of(call->k_grad, head, packed_first), row_of(call->v_grad, head, packed_first),
                                  call->k_grad.row, call->v_grad.row};
            const Keys own = {own_k_across, own_v_across, own_along, 0, last - first, last - first, length,
                              row_of(call->own_k_grad, head, first), row_of(call->own_v_grad, head, first),
                              call->own_k_grad.row, call->own_v_grad.row};
            const size num_unmasked = length - (tile->num_masked - (has_own ? last - first : 0));
            const size num_shared = tile->distinct_id && num_unmasked > 0 ? num_unmasked / PANEL * PANEL : 0;
            gather(of.rows, call->q, q, first, last, d, call->scale);
            if (!is_backward) {
                forward_tile(call, tile, q, &of, &distinct, &context, has_own ? &own : NULL, num_shared, scores);
                continue;
            }
            const Turn turn = {i > 0 ? progress + i - 1 : NULL, progress + i};
            backward_tile(call, tile, q, &turn, &of, &distinct, &context, has_own ? &own : NULL, num_shared, scores, inner);
            wait_for(&turn, LONG_MAX); /* whoever waits for this one need not look at the one before it */
            advance(&turn, LONG_MAX);
        }
    }
}

/* ---------- softmax ---------- */

INLINE vec load_some(const float *p, size n) {
    vec x = {0};
    for (size i = 0; i < n; i++) x[i] = p[i];
    return x;
}

INLINE void store_some(float *p, vec x, size n) {
    for (size i = 0; i < n; i++) p[i] = x[i];
}

/* For each vector's worth of n numbers at i: READ(pointer) and WRITE(pointer, x) touch no more than there are. */
#define READ(p) (n - i >= LANES ? load((p) + i) : load_some((p) + i, n - i))
#define WRITE(p, x) (n - i >= LANES ? store((p) + i, x) : store_some((p) + i, x, n - i))

/* Rows of logits x, [m, n]: best, where the largest stands (first); log_sum of the sum of exp(x). With `target` (row
 * target_row[r] of it, a distribution): dot = sum x target, and x becomes softmax(x) - target. Without: dot = sum x
 * softmax(x), and x becomes softmax(x). x stays as it is unless `is_written`. */
#define STRIP 1024 /* numbers of a row whose largest is found before we see whether it exceeds those before */
typedef struct {
    float *x;
    size m, n;
    const float *target;
    size target_stride;
    const long long *target_row;
    size is_written;
    long long *best;
    float *log_sum, *dot;
} Softmax;

void peagle_softmax(const void *part) {
    const Softmax of = *(const Softmax *)part;
    const size n = of.n;
    for (size r = 0; r < of.m; r++) {
        float *x = of.x + r * n;
        const float *target = of.target ? of.target + of.target_row[r] * of.target_stride : NULL;
        vec sum[2] = {0}, product[2] = {0};
        float max = x[0];
        size i = 0, best = 0;
        while (i < n) {
            const size first = i, end = n - i > STRIP ? i + STRIP : n;
            vec maxima[4] = {all(x[i]), all(x[i]), all(x[i]), all(x[i])};
            for (; i + 4 * LANES <= end; i += 4 * LANES)
                for (int j = 0; j < 4; j++) maxima[j] = larger(load(x + i + j * LANES), maxima[j]);
            float own = max_of(larger(larger(maxima[0], maxima[1]), larger(maxima[2], maxima[3])));
            for (; i < end; i++) own = own > x[i] ? own : x[i];
            if (own > max) max = own, best = first;
        }
        while (best < n - 1 && x[best] != max) best++;
        for (i = 0; i < n; i += LANES) {
            const vec one = READ(x);
            vec p = exponential(one - all(max));
            if (n - i < LANES)
                for (size j = n - i; j < LANES; j++) p[j] = 0;
            sum[i / LANES % 2] += p;
            product[i / LANES % 2] += one * (target ? READ(target) : p);
            if (of.is_written) WRITE(x, p);
        }
        const float total = sum_of(sum[0] + sum[1]), share = 1.0f / total;
        of.best[r] = best;
        of.log_sum[r] = max + __builtin_logf(total);
        of.dot[r] = sum_of(product[0] + product[1]) * (target ? 1.0f : share);
        if (!of.is_written) continue;
        for (i = 0; i < n; i += LANES) WRITE(x, target ? READ(x) * share - READ(target) : READ(x) * share);
    }
}

/* ---------- threads ---------- */

/* GOMP_parallel of the OpenMP library that PyTorch uses: runs a function in each of its threads. Its threads spin for a
 * while once they have nothing to do, so threads of our own would compete with them for the cores. */
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
