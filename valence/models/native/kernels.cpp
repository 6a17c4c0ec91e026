// Attention along the paths of a prefix tree, and the log-softmax of the head, for bfloat16 on processors with AVX-512 BF16.
//
// Every product is one routine: C[M, N] = A[M, K] B[K, N] in float32. Two bfloat16 numbers that are adjacent along K share a 32-bit
// word ("pair"): A[M][K/2], B[K/2][N]. Heads (in the log-softmax: rows) are independent tasks, so results do not depend on the
// number of threads. The forward pass has all scores of a tile of queries at once, computes a plain softmax, and stores the
// log-sum-exp. The backward pass computes the scores again from it, one block of columns at a time.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using Half = uint16_t;
using Pair = uint32_t;

constexpr int64_t WIDTH = 16;         // numbers in a vector
constexpr int64_t PANEL = 4 * WIDTH;  // columns that a tile of a product covers

int64_t round_up(int64_t n, int64_t to = WIDTH) { return (n + to - 1) / to * to; }

__m512i to_bfloat16(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

float dot(const Half* a, const Half* b, int64_t n) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += WIDTH) {
    __m512 one = _mm512_cvtpbh_ps((__m256bh)_mm256_loadu_si256((const __m256i*)(a + i)));
    sum = _mm512_fmadd_ps(one, _mm512_cvtpbh_ps((__m256bh)_mm256_loadu_si256((const __m256i*)(b + i))), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

template <int R, int C>
void tile(const Pair* a, int64_t lda, const Pair* b, int64_t ldb, float* c, int64_t ldc, int64_t pairs, bool add) {
  __m512 sums[R][C];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < C; j++) sums[r][j] = add ? _mm512_loadu_ps(c + r * ldc + j * WIDTH) : _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; k++) {
    __m512bh row[C];
    for (int j = 0; j < C; j++) row[j] = (__m512bh)_mm512_loadu_si512(b + k * ldb + j * WIDTH);
    for (int r = 0; r < R; r++) {
      __m512bh one = (__m512bh)_mm512_set1_epi32(int(a[r * lda + k]));
      for (int j = 0; j < C; j++) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], one, row[j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < C; j++) _mm512_storeu_ps(c + r * ldc + j * WIDTH, sums[r][j]);
}

template <int C>
void columns(const Pair* a, int64_t lda, const Pair* b, int64_t ldb, float* c, int64_t ldc, int64_t m, int64_t pairs, bool add) {
  int64_t r = 0;
  for (; r + 6 <= m; r += 6) tile<6, C>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, pairs, add);
  for (; r + 4 <= m; r += 4) tile<4, C>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, pairs, add);
  for (; r + 2 <= m; r += 2) tile<2, C>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, pairs, add);
  for (; r < m; r++) tile<1, C>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, pairs, add);
}

// C[m, n] = (C +) A[m, 2 pairs] B[2 pairs, n]; n is a multiple of WIDTH. B is stored in panels of PANEL columns,
// [n / PANEL][depth][PANEL]: with consecutive rows, all rows would map to the same cache lines.
void product(const Pair* a, int64_t lda, const Pair* b, int64_t depth, float* c, int64_t ldc, int64_t m, int64_t n, int64_t pairs,
             bool add = false) {
  int64_t j = 0;
  for (; j + PANEL <= n; j += PANEL) columns<4>(a, lda, b + j * depth, PANEL, c + j, ldc, m, pairs, add);
  switch ((n - j) / WIDTH) {
    case 3: return columns<3>(a, lda, b + j * depth, PANEL, c + j, ldc, m, pairs, add);
    case 2: return columns<2>(a, lda, b + j * depth, PANEL, c + j, ldc, m, pairs, add);
    case 1: return columns<1>(a, lda, b + j * depth, PANEL, c + j, ldc, m, pairs, add);
  }
}

// Transpose 16 x 16 numbers of 32 bits: swap blocks of 8, 4, 2 and 1 across the diagonal.
void transpose16(__m512i* rows) {
  __m512i at = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int s = 8; s; s /= 2) {
    __m512i step = _mm512_set1_epi32(s), other = _mm512_set1_epi32(16);
    __mmask16 right = _mm512_test_epi32_mask(at, step);
    __m512i upper = _mm512_mask_add_epi32(at, right, at, _mm512_sub_epi32(other, step));
    __m512i lower = _mm512_mask_add_epi32(_mm512_add_epi32(at, step), right, at, other);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      if (!(i & s)) {
        __m512i one = rows[i], two = rows[i + s];
        rows[i] = _mm512_permutex2var_epi32(one, upper, two);
        rows[i + s] = _mm512_permutex2var_epi32(one, lower, two);
      }
  }
}

// Write 16 rows of ``pairs`` pairs as the first ``width`` of 16 columns of out[pairs][ld]. load(i, k, mask) returns pairs k to k + 16
// of row i.
template <class Load>
void transpose_pairs(int64_t pairs, Load load, Pair* out, int64_t ld = PANEL, int64_t width = WIDTH) {
  __mmask16 mask = __mmask16((1u << std::min(width, WIDTH)) - 1);
  for (int64_t k = 0; k < pairs; k += WIDTH) {
    int64_t left = std::min(WIDTH, pairs - k);
    __m512i rows[WIDTH];
    for (int64_t i = 0; i < WIDTH; i++) rows[i] = load(i, k, __mmask16((1u << left) - 1));
    transpose16(rows);
    for (int64_t i = 0; i < left; i++) _mm512_mask_storeu_epi32(out + (k + i) * ld, mask, rows[i]);
  }
}

// exp(x) for x <= 0: 2^n times a polynomial in the remainder of x / ln 2, with the smallest relative error for its degree.
template <size_t N>
__m512 exponential(__m512 x, const float (&terms)[N]) {
  x = _mm512_max_ps(_mm512_set1_ps(-100.0f), x);  // in this order, NaN stays NaN
  __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.69314718055994531f), x), p = _mm512_set1_ps(terms[0]);
  for (size_t i = 1; i < N; i++) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(terms[i]));
  return _mm512_scalef_ps(p, n);
}
constexpr float EXACT[] = {1.3836846e-3f, 8.3748158e-3f, 4.1668225e-2f, 0.16666420f, 0.49999991f, 1.0f, 1.0f};  // 2e-7
constexpr float ROUGH[] = {4.1458607e-2f, 0.16790907f, 0.50004357f, 0.99996340f, 0.99999928f};  // 3e-6: for results in bfloat16

struct Strided {  // [heads, rows, D] of bfloat16, dense in the last axis
  const Half* data;
  int64_t head, row;
  const Half* at(int64_t h, int64_t r) const { return data + h * head + r * row; }
};

const Half ZEROS[1024] = {};  // replaces rows beyond the last

using Rows = std::vector<const Half*>;

Rows gather(const Strided& x, int64_t head, const int64_t* rows, int64_t count) {
  Rows pointers(count);
  for (int64_t i = 0; i < count; i++) pointers[i] = x.at(head, rows[i]);
  return pointers;
}

// Pair adjacent rows, for products over rows: [depth, D] in panels. The first of these rows is row 2 * ``from``.
void interleave(const Rows& rows, int64_t from, int64_t d, int64_t depth, Pair* out) {
  int64_t n = rows.size();
  for (int64_t k = 0; k < round_up(n) / 2; k++) {
    const Half *low = 2 * k < n ? rows[2 * k] : ZEROS, *high = 2 * k + 1 < n ? rows[2 * k + 1] : ZEROS;
    for (int64_t j = 0; j < d; j += PANEL)
      for (int64_t i = j; i < std::min(d, j + PANEL); i++)
        out[j * depth + (from + k) * PANEL + i - j] = Pair(low[i]) | Pair(high[i]) << 16;
  }
}

// Transpose rows of pairs, for products over D: [D / 2, rows] in panels.
void transpose(const Rows& rows, int64_t d, Pair* out) {
  int64_t n = rows.size();
  for (int64_t r = 0; r < n; r += WIDTH) {
    const Half* from[WIDTH];
    for (int64_t i = 0; i < WIDTH; i++) from[i] = r + i < n ? rows[r + i] : ZEROS;
    auto load = [&](int64_t i, int64_t k, __mmask16 mask) { return _mm512_maskz_loadu_epi32(mask, (const Pair*)from[i] + k); };
    transpose_pairs(d / 2, load, out + r / PANEL * PANEL * (d / 2) + r % PANEL);
  }
}

// Pair adjacent rows and transpose them: column k of out[D][ld] contains rows 2k and 2k + 1.
void interleave_transposed(const Rows& rows, int64_t d, int64_t ld, Pair* out) {
  int64_t n = rows.size();
  for (int64_t r = 0; r < ld; r += WIDTH) {
    auto load = [&](int64_t i, int64_t k, __mmask16) {  // D is a multiple of 16
      int64_t low = 2 * (r + i), high = low + 1;
      __m512i one = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)((low < n ? rows[low] : ZEROS) + k)));
      __m512i two = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)((high < n ? rows[high] : ZEROS) + k)));
      return _mm512_or_si512(one, _mm512_slli_epi32(two, 16));
    };
    transpose_pairs(d, load, out + r, ld, ld - r);
  }
}

struct Sizes {
  // queries: of one head. A task computes ``together`` of the ``groups`` heads that share keys.
  int64_t heads, groups, together, queries, d, dv, window, threads;
  float scale;
};

struct Runs {  
  // queries of run r: queries[query_at[r] .. query_at[r + 1]); keys of its path: keys[key_at[r] .. key_at[r + 1])
  int64_t count;
  const int64_t *queries, *query_at, *keys, *key_at;

  const int64_t* path(int64_t r) const { return keys + key_at[r]; }
  int64_t length(int64_t r) const { return key_at[r + 1] - key_at[r]; }
  int64_t longest() const {
    int64_t longest = 0;
    for (int64_t r = 0; r < count; r++) longest = std::max(longest, length(r));
    return round_up(longest, PANEL);
  }
  // Number of keys, in full panels, that the path of a run shares with the path of the run before.
  int64_t common(int64_t r) const {
    if (!r) return 0;
    const int64_t *here = path(r), *before = path(r - 1);
    int64_t shorter = std::min(length(r), length(r - 1));
    return (std::mismatch(here, here + shorter, before).first - here) / PANEL * PANEL;
  }
};

struct Query {
  int64_t head, row, last;  // last: the last key that it attends to
};

// Queries of one run and all heads of a task. Products of a tile cover the columns from ``begin`` (a multiple of PANEL) to ``end``.
struct Tile {
  std::vector<Query> queries;
  int64_t begin, end, window;

  int64_t size() const { return queries.size(); }
  // Mask of the columns j to j + 16 that query i attends to.
  __mmask16 visible(int64_t i, int64_t j) const {
    int64_t last = queries[i].last - j, first = window ? last - window + 1 : 0;
    uint32_t mask = last < 0 ? 0 : last < WIDTH - 1 ? (2u << last) - 1 : 0xffff;
    return first <= 0 ? mask : first < WIDTH ? mask & (0xffffu << first) : 0;
  }
  Rows of(const Strided& x) const {
    Rows pointers;
    for (const Query& query : queries) pointers.push_back(x.at(query.head, query.row));
    return pointers;
  }
};

// exp(scale * score - largest) of scores[n][ld] in bfloat16 (weights[n][ld / 2] pairs), 0 for masked keys; and for each row
// 1 / (their sum), and ``lse``, the logarithm of the sum of exp(scale * score).
void softmax(const float* scores, int64_t ld, const Tile& tile, float scale, Pair* weights, float* inverse, float* lse) {
  int64_t width = tile.end - tile.begin;
  for (int64_t i = 0; i < tile.size(); i++) {
    const float* row = scores + i * ld;
    __m512 top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), factor = _mm512_set1_ps(scale);
    for (int64_t j = 0; j < width; j += WIDTH)
      top = _mm512_mask_max_ps(top, tile.visible(i, tile.begin + j), top, _mm512_loadu_ps(row + j));
    float largest = _mm512_reduce_max_ps(top) * scale;
    top = _mm512_set1_ps(largest);
    for (int64_t j = 0; j < width; j += WIDTH) {
      __m512 e = exponential(_mm512_fmsub_ps(_mm512_loadu_ps(row + j), factor, top), ROUGH);
      e = _mm512_maskz_mov_ps(tile.visible(i, tile.begin + j), e);
      sum = _mm512_add_ps(sum, e);
      _mm256_storeu_si256((__m256i*)((Half*)(weights + i * ld / 2) + j), (__m256i)_mm512_cvtneps_pbh(e));
    }
    float total = _mm512_reduce_add_ps(sum);
    inverse[i] = 1.0f / total, lse[i] = largest + std::log(total);
  }
}

// For the columns j to j + n of a tile: the softmax weights w = exp(scale * score - lse) of scores[rows][ld], and the gradients of
// the scores, w (weight_grad - inner) scale, from those of w in weight_grads[rows][ld]. Both in bfloat16, with adjacent rows as pairs
// in panels (weights, score_grads_t: [depth, n]); the gradients also with adjacent columns as pairs (score_grads[rows][ld / 2]).
void softmax_backward(const float* scores, const float* weight_grads, int64_t ld, const Tile& tile, int64_t j, int64_t n,
                      float scale, const float* lse, const float* inner, Pair* weights, Pair* score_grads,
                      Pair* score_grads_t, int64_t depth) {
  int64_t rows = tile.size();
  __m512 factor = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < rows; i += 2)
    for (int64_t c = 0; c < n; c += WIDTH) {
      __m512i pair[2] = {}, grads[2] = {};
      for (int64_t k = i; k < std::min(i + 2, rows); k++) {
        __mmask16 visible = tile.visible(k, j + c);
        __m512 score = _mm512_fmsub_ps(_mm512_loadu_ps(scores + k * ld + c), factor, _mm512_set1_ps(lse[k]));
        __m512 weight = _mm512_maskz_mov_ps(visible, exponential(score, ROUGH));
        __m512 grad = _mm512_fmsub_ps(_mm512_loadu_ps(weight_grads + k * ld + c), factor, _mm512_set1_ps(inner[k] * scale));
        pair[k - i] = to_bfloat16(weight), grads[k - i] = to_bfloat16(_mm512_maskz_mul_ps(visible, weight, grad));
        _mm256_storeu_si256((__m256i*)((Half*)(score_grads + k * ld / 2) + c), _mm512_cvtepi32_epi16(grads[k - i]));
      }
      int64_t at = (c / PANEL * depth + i / 2) * PANEL + c % PANEL;
      _mm512_storeu_si512(weights + at, _mm512_or_si512(pair[0], _mm512_slli_epi32(pair[1], 16)));
      _mm512_storeu_si512(score_grads_t + at, _mm512_or_si512(grads[0], _mm512_slli_epi32(grads[1], 16)));
    }
}

void store(const float* from, int64_t n, float factor, Half* to) {
  for (int64_t j = 0; j < n; j += WIDTH) {
    __m512 x = _mm512_mul_ps(_mm512_loadu_ps(from + j), _mm512_set1_ps(factor));
    _mm256_storeu_si256((__m256i*)(to + j), (__m256i)_mm512_cvtneps_pbh(x));
  }
}

// Add the transposed columns of x[d][ld] to these rows of to[][d], and set them to 0.
void add_transposed(float* x, int64_t ld, int64_t d, const int64_t* rows, int64_t count, float* to) {
  for (int64_t j = 0; j < count; j += WIDTH)
    for (int64_t i = 0; i < d; i += WIDTH) {
      __m512i turned[WIDTH];
      for (int64_t k = 0; k < WIDTH; k++) {
        turned[k] = _mm512_loadu_si512(x + (i + k) * ld + j);
        _mm512_storeu_ps(x + (i + k) * ld + j, _mm512_setzero_ps());
      }
      transpose16(turned);
      for (int64_t k = 0; k < std::min(WIDTH, count - j); k++) {
        float* sum = to + rows[j + k] * d + i;
        _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), (__m512)turned[k]));
      }
    }
}

template <class Task>
void parallel(int64_t tasks, int64_t threads, Task task) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t i = 0; i < tasks; i++) task(i);
}

// Call use(tile) for each tile of a run and task, with about ``tile_rows`` queries.
template <class Use>
void tiles(int64_t task, const Sizes& s, const Runs& runs, int64_t run, int64_t tile_rows, Use use) {
  const int64_t* queries = runs.queries + runs.query_at[run];
  int64_t n = runs.query_at[run + 1] - runs.query_at[run], step = std::max<int64_t>(1, tile_rows / s.together);
  for (int64_t start = 0; start < n; start += step) {
    int64_t count = std::min(step, n - start), above = runs.length(run) - n + start;
    int64_t begin = s.window ? std::max<int64_t>(0, above - s.window + 1) / PANEL * PANEL : 0;
    Tile tile{{}, begin, round_up(above + count), s.window};
    for (int64_t h = task * s.together; h < (task + 1) * s.together; h++)
      for (int64_t i = 0; i < count; i++) tile.queries.push_back({h, queries[start + i], above + i});
    use(tile);
  }
}

// Copy rows to consecutive memory, [n][d / 2] pairs.
void dense(const Rows& rows, int64_t d, Pair* out) {
  for (size_t i = 0; i < rows.size(); i++) std::memcpy(out + i * d / 2, rows[i], d * sizeof(Half));
}

}  // namespace

// out[queries, heads, dv] in bfloat16, and lse[heads, queries]: the logarithm of the sum of exp(score) over the keys of a query.
extern "C" void forward(const Sizes* s, const Runs* runs, const Strided* q, const Strided* k, const Strided* v, Half* out,
                        float* lse) {
  int64_t longest = runs->longest();
  parallel(s->heads / s->together, s->threads, [&](int64_t task) {
    int64_t shared = task * s->together / s->groups;
    std::vector<Pair> keys(longest * s->d / 2), values(longest / 2 * round_up(s->dv, PANEL)), queries, weights;
    std::vector<float> scores, sums, inverse, lses;
    for (int64_t r = 0; r < runs->count; r++) {
      int64_t count = runs->length(r), from = runs->common(r), ld = round_up(count);
      const int64_t* new_keys = runs->path(r) + from;
      int64_t tile_rows = std::max(s->together, count <= 1024 ? 64 : count <= 4096 ? 32 : WIDTH);
      queries.resize(tile_rows * s->d / 2), weights.resize(tile_rows * ld / 2), scores.resize(tile_rows * ld);
      sums.resize(tile_rows * s->dv), inverse.resize(tile_rows), lses.resize(tile_rows);
      transpose(gather(*k, shared, new_keys, count - from), s->d, keys.data() + from * s->d / 2);
      interleave(gather(*v, shared, new_keys, count - from), from / 2, s->dv, longest / 2, values.data());
      tiles(task, *s, *runs, r, tile_rows, [&](const Tile& t) {
        int64_t n = t.size(), width = t.end - t.begin;
        dense(t.of(*q), s->d, queries.data());
        product(queries.data(), s->d / 2, keys.data() + t.begin * s->d / 2, s->d / 2, scores.data(), ld, n, width, s->d / 2);
        softmax(scores.data(), ld, t, s->scale, weights.data(), inverse.data(), lses.data());
        product(weights.data(), ld / 2, values.data() + t.begin / 2 * PANEL, longest / 2, sums.data(), s->dv, n, s->dv,
                width / 2);
        for (int64_t i = 0; i < n; i++) {
          const Query& query = t.queries[i];
          store(sums.data() + i * s->dv, s->dv, inverse[i], out + (query.row * s->heads + query.head) * s->dv);
          lse[query.head * s->queries + query.row] = lses[i];
        }
      });
    }
  });
}

// d_q[queries, heads, d] in bfloat16; d_k[tasks, keys, d] and d_v[tasks, keys, dv] in float32, to which this adds.
extern "C" void backward(const Sizes* s, const Runs* runs, const Strided* q, const Strided* k, const Strided* v, const Strided* out,
                         const Strided* grad, const float* lse, Half* d_q, float* d_k, float* d_v, int64_t key_rows) {
  constexpr int64_t BLOCK = 2 * PANEL;  // number of columns with scores at the same time
  int64_t tile_rows = std::max<int64_t>(s->together, 128), depth = (tile_rows + 1) / 2;
  int64_t longest = runs->longest(), ld = longest + WIDTH;  // not a multiple of the page size: all rows would share cache lines
  parallel(s->heads / s->together, s->threads, [&](int64_t task) {
    int64_t shared = task * s->together / s->groups;
    std::vector<Pair> keys(longest * s->d / 2), values(longest * s->dv / 2), key_pairs(longest / 2 * round_up(s->d, PANEL));
    std::vector<Pair> queries(tile_rows * s->d / 2), grads(tile_rows * s->dv / 2), queries_t(depth * s->d), grads_t(depth * s->dv);
    std::vector<Pair> score_grads(tile_rows * BLOCK / 2), score_grads_t(depth * BLOCK), weights(depth * BLOCK);
    std::vector<float> scores(tile_rows * BLOCK), weight_grads(tile_rows * BLOCK), sums(tile_rows * s->d);
    std::vector<float> by_key(s->d * ld), by_value(s->dv * ld), lses(tile_rows), inner(tile_rows);
    for (int64_t r = 0; r < runs->count; r++) {
      int64_t count = runs->length(r), from = runs->common(r);
      const int64_t* path = runs->path(r);
      auto new_keys = gather(*k, shared, path + from, count - from);
      transpose(new_keys, s->d, keys.data() + from * s->d / 2);
      interleave(new_keys, from / 2, s->d, longest / 2, key_pairs.data());
      transpose(gather(*v, shared, path + from, count - from), s->dv, values.data() + from * s->dv / 2);
      tiles(task, *s, *runs, r, tile_rows, [&](const Tile& t) {
        int64_t n = t.size(), half = (n + 1) / 2;
        Rows query = t.of(*q), grad_rows = t.of(*grad), outputs = t.of(*out);
        dense(query, s->d, queries.data()), dense(grad_rows, s->dv, grads.data());
        interleave_transposed(query, s->d, half, queries_t.data()), interleave_transposed(grad_rows, s->dv, half, grads_t.data());
        for (int64_t i = 0; i < n; i++) {
          inner[i] = dot(grad_rows[i], outputs[i], s->dv);
          lses[i] = lse[t.queries[i].head * s->queries + t.queries[i].row];
        }
        for (int64_t j = t.begin; j < t.end; j += BLOCK) {
          int64_t width = std::min(BLOCK, t.end - j);
          product(queries.data(), s->d / 2, keys.data() + j * s->d / 2, s->d / 2, scores.data(), BLOCK, n, width, s->d / 2);
          product(grads.data(), s->dv / 2, values.data() + j * s->dv / 2, s->dv / 2, weight_grads.data(), BLOCK, n, width,
                  s->dv / 2);
          softmax_backward(scores.data(), weight_grads.data(), BLOCK, t, j, width, s->scale, lses.data(), inner.data(), weights.data(),
                           score_grads.data(), score_grads_t.data(), depth);
          product(grads_t.data(), half, weights.data(), depth, by_value.data() + j, ld, s->dv, width, half, true);
          product(queries_t.data(), half, score_grads_t.data(), depth, by_key.data() + j, ld, s->d, width, half, true);
          product(score_grads.data(), BLOCK / 2, key_pairs.data() + j / 2 * PANEL, longest / 2, sums.data(), s->d, n, s->d,
                  width / 2, j > t.begin);
        }
        for (int64_t i = 0; i < n; i++) {
          int64_t to = t.queries[i].row * s->heads + t.queries[i].head;
          store(sums.data() + i * s->d, s->d, 1.0f, d_q + to * s->d);
        }
      });
      int64_t num_shared = r + 1 < runs->count ? runs->common(r + 1) : 0;  // the next run adds to these sums
      add_transposed(by_key.data() + num_shared, ld, s->d, path + num_shared, count - num_shared, d_k + task * key_rows * s->d);
      add_transposed(by_value.data() + num_shared, ld, s->dv, path + num_shared, count - num_shared, d_v + task * key_rows * s->dv);
    }
  });
}

// One range of the vocabulary for all rows: logits = hidden[rows, h] weight[columns, h]^T. Stores only exp(logit - maximum of the
// row) in bfloat16 (probabilities[rows, columns], may be null), and stats[4][rows]: the largest logit, the sum of the exponentials,
// the sum of distance * exponential, and the logit at column target[row] (0 if that is not in the range).
// The weight is bfloat16 (half) or float32, which is rounded.
extern "C" void measure(const Half* hidden, const void* weight, const int64_t* target, float* stats, Half* probabilities,
                        int64_t rows, int64_t columns, int64_t h, float scale, int64_t half, int64_t threads) {
  constexpr int64_t BLOCK = 30;
  int64_t panels = (columns + PANEL - 1) / PANEL, padded = panels * PANEL;
  std::vector<Pair> packed(padded * h / 2);  // [panels][h / 2][PANEL]
  parallel(panels, threads, [&](int64_t p) {
    Pair* out = packed.data() + p * PANEL * h / 2;
    for (int64_t j = 0; j < PANEL; j += WIDTH) {
      auto load = [&](int64_t i, int64_t k, __mmask16 mask) {
        int64_t at = std::min(p * PANEL + j + i, columns - 1) * h + 2 * k;
        if (half) return _mm512_maskz_loadu_epi32(mask, (const Half*)weight + at);
        const float* row = (const float*)weight + at;
        __m512 rest = mask == 0xffff ? _mm512_loadu_ps(row + WIDTH) : _mm512_setzero_ps();
        return (__m512i)_mm512_cvtne2ps_pbh(rest, _mm512_loadu_ps(row));
      };
      transpose_pairs(h / 2, load, out + j);
    }
  });
  parallel((rows + BLOCK - 1) / BLOCK, threads, [&](int64_t b) {
    int64_t first = b * BLOCK, count = std::min(BLOCK, rows - first);
    std::vector<float> logits(count * padded);
    const Pair* a = (const Pair*)(hidden + first * h);
    product(a, h / 2, packed.data(), h / 2, logits.data(), padded, count, padded, h / 2);
    for (int64_t r = 0; r < count; r++) {
      float* row = logits.data() + r * padded;
      int64_t i = first + r, hit = target[i];
      stats[3 * rows + i] = hit >= 0 && hit < columns ? row[hit] * scale : 0;
      std::fill(row + columns, row + padded, -INFINITY);
      __m512 factor = _mm512_set1_ps(scale), top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), mean = sum;
      for (int64_t j = 0; j < padded; j += WIDTH) {
        __m512 x = _mm512_mul_ps(_mm512_loadu_ps(row + j), factor);
        _mm512_storeu_ps(row + j, x);
        top = _mm512_max_ps(top, x);
      }
      float largest = _mm512_reduce_max_ps(top);
      top = _mm512_set1_ps(largest);
      for (int64_t j = 0; j < padded; j += WIDTH) {
        __m512 distance = _mm512_sub_ps(_mm512_loadu_ps(row + j), top);
        __mmask16 mask = _cvtu32_mask16(j + WIDTH <= columns ? 0xffff : (1u << std::max<int64_t>(0, columns - j)) - 1);
        __m512 e = _mm512_maskz_mov_ps(mask, exponential(distance, EXACT));
        sum = _mm512_add_ps(sum, e);
        mean = _mm512_mask3_fmadd_ps(e, distance, mean, mask);
        if (probabilities) _mm256_mask_storeu_epi16(probabilities + i * columns + j, mask, (__m256i)_mm512_cvtneps_pbh(e));
      }
      stats[i] = largest, stats[rows + i] = _mm512_reduce_add_ps(sum), stats[2 * rows + i] = _mm512_reduce_add_ps(mean);
    }
  });
}
