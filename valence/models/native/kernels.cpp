// Attention along the paths of a forest, and the head's log-softmax, for bfloat16 on processors that multiply it (AVX-512 BF16).
//
// Every product is one routine: C[M, N] = A[M, K] B[K, N] in float32, where bfloat16 numbers that are neighbours along K lie
// together in one 32-bit word ("pairs"): A[M][K/2], B[K/2][N]. Heads (of the head: rows) are independent tasks, so results do
// not depend on the number of threads. The forward pass has the scores of a tile of queries as a whole, so a plain softmax will do,
// and keeps their log-sum-exp; with that the backward pass computes them again, a block of columns at a time.

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

int64_t up(int64_t n, int64_t to = WIDTH) { return (n + to - 1) / to * to; }

__m512i narrow(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

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

// C[m, n] = (C +) A[m, 2 pairs] B[2 pairs, n]; n is a multiple of WIDTH. B lies in panels of PANEL columns, [n / PANEL][depth][PANEL]:
// its rows one after another would fall on the same lines of the cache.
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

// Transposes 16 x 16 numbers of 32 bits: blocks of 8, 4, 2 and 1 change places across the diagonal.
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

// Packs 16 rows of ``pairs`` pairs as 16 columns of out[pairs][ld], of which the first ``wide`` exist; load(i, k, mask) gives pairs
// k to k + 16 of row i.
template <class Load>
void turn(int64_t pairs, Load load, Pair* out, int64_t ld = PANEL, int64_t wide = WIDTH) {
  __mmask16 there = __mmask16((1u << std::min(wide, WIDTH)) - 1);
  for (int64_t k = 0; k < pairs; k += WIDTH) {
    int64_t left = std::min(WIDTH, pairs - k);
    __m512i rows[WIDTH];
    for (int64_t i = 0; i < WIDTH; i++) rows[i] = load(i, k, __mmask16((1u << left) - 1));
    transpose16(rows);
    for (int64_t i = 0; i < left; i++) _mm512_mask_storeu_epi32(out + (k + i) * ld, there, rows[i]);
  }
}

// exp(x) for x <= 0: 2^n times a polynomial in what is left of x / ln 2, the one of least relative error for its degree.
template <size_t N>
__m512 exponential(__m512 x, const float (&terms)[N]) {
  x = _mm512_max_ps(_mm512_set1_ps(-100.0f), x);  // in this order a NaN stays one
  __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.69314718055994531f), x), p = _mm512_set1_ps(terms[0]);
  for (size_t i = 1; i < N; i++) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(terms[i]));
  return _mm512_scalef_ps(p, n);
}
constexpr float EXACT[] = {1.3836846e-3f, 8.3748158e-3f, 4.1668225e-2f, 0.16666420f, 0.49999991f, 1.0f, 1.0f};  // 2e-7
constexpr float ROUGH[] = {4.1458607e-2f, 0.16790907f, 0.50004357f, 0.99996340f, 0.99999928f};  // 3e-6: for what becomes bfloat16

struct Strided {  // [heads, rows, D] of bfloat16, whose last axis is dense
  const Half* data;
  int64_t head, row;
  const Half* at(int64_t h, int64_t r) const { return data + h * head + r * row; }
};

const Half ZEROS[1024] = {};  // what stands for rows beyond the last

using Rows = std::vector<const Half*>;

Rows gather(const Strided& x, int64_t head, const int64_t* rows, int64_t count) {
  Rows found(count);
  for (int64_t i = 0; i < count; i++) found[i] = x.at(head, rows[i]);
  return found;
}

// Rows next to each other as pairs, for products over rows: [depth, D] in panels, of which these are the rows from 2 ``from`` on.
void interleave(const Rows& rows, int64_t from, int64_t d, int64_t depth, Pair* out) {
  int64_t n = rows.size();
  for (int64_t k = 0; k < up(n) / 2; k++) {
    const Half *low = 2 * k < n ? rows[2 * k] : ZEROS, *high = 2 * k + 1 < n ? rows[2 * k + 1] : ZEROS;
    for (int64_t j = 0; j < d; j += PANEL)
      for (int64_t i = j; i < std::min(d, j + PANEL); i++)
        out[j * depth + (from + k) * PANEL + i - j] = Pair(low[i]) | Pair(high[i]) << 16;
  }
}

// Transposed, numbers next to each other as pairs, for products over D: [D / 2, rows] in panels.
void transpose(const Rows& rows, int64_t d, Pair* out) {
  int64_t n = rows.size();
  for (int64_t r = 0; r < n; r += WIDTH) {
    const Half* from[WIDTH];
    for (int64_t i = 0; i < WIDTH; i++) from[i] = r + i < n ? rows[r + i] : ZEROS;
    auto load = [&](int64_t i, int64_t k, __mmask16 there) { return _mm512_maskz_loadu_epi32(there, (const Pair*)from[i] + k); };
    turn(d / 2, load, out + r / PANEL * PANEL * (d / 2) + r % PANEL);
  }
}

// Interleaved and transposed: out[D][ld] holds rows 2k and 2k + 1 as pairs.
void both(const Rows& rows, int64_t d, int64_t ld, Pair* out) {
  int64_t n = rows.size();
  for (int64_t r = 0; r < ld; r += WIDTH) {
    auto load = [&](int64_t i, int64_t k, __mmask16) {  // D is a multiple of 16
      int64_t low = 2 * (r + i), high = low + 1;
      __m512i one = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)((low < n ? rows[low] : ZEROS) + k)));
      __m512i two = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)((high < n ? rows[high] : ZEROS) + k)));
      return _mm512_or_si512(one, _mm512_slli_epi32(two, 16));
    };
    turn(d, load, out + r, ld, ld - r);
  }
}

struct Sizes {
  // queries: of one head. A task runs ``together`` of the ``groups`` heads that share keys.
  int64_t heads, groups, together, queries, d, dv, window, threads;
  float scale;
};

struct Runs {  // queries of run r: own[own_at[r] .. own_at[r + 1]); keys of its path: keys[key_at[r] .. key_at[r + 1])
  int64_t count;
  const int64_t *own, *own_at, *keys, *key_at;

  const int64_t* path(int64_t r) const { return keys + key_at[r]; }
  int64_t length(int64_t r) const { return key_at[r + 1] - key_at[r]; }
  int64_t longest() const {
    int64_t most = 0;
    for (int64_t r = 0; r < count; r++) most = std::max(most, length(r));
    return up(most, PANEL);
  }
  // How many keys, in whole panels, the path of a run has in common with that of the run before.
  int64_t common(int64_t r) const {
    if (!r) return 0;
    const int64_t *here = path(r), *before = path(r - 1);
    int64_t most = std::min(length(r), length(r - 1));
    return (std::mismatch(here, here + most, before).first - here) / PANEL * PANEL;
  }
};

struct Query {
  int64_t head, row, last;  // last: the last key that it sees
};

// Queries of one run, of all heads of a task. Products of a tile cover the columns from ``begin``, whole panels, to ``end``.
struct Tile {
  std::vector<Query> queries;
  int64_t begin, end, window;

  int64_t size() const { return queries.size(); }
  // Which of the columns j to j + 16 query i sees.
  __mmask16 seen(int64_t i, int64_t j) const {
    int64_t last = queries[i].last - j, first = window ? last - window + 1 : 0;
    uint32_t found = last < 0 ? 0 : last < WIDTH - 1 ? (2u << last) - 1 : 0xffff;
    return first <= 0 ? found : first < WIDTH ? found & (0xffffu << first) : 0;
  }
  Rows of(const Strided& x) const {
    Rows found;
    for (const Query& query : queries) found.push_back(x.at(query.head, query.row));
    return found;
  }
};

// exp(scale * score - largest) of scores[n][ld] in bfloat16 (weights[n][ld / 2] pairs), 0 where a key is not seen; and of each row
// 1 / (the sum of these), and ``lse``, the logarithm of the sum of exp(scale * score).
void softmax(const float* scores, int64_t ld, const Tile& tile, float scale, Pair* weights, float* inverse, float* lse) {
  int64_t wide = tile.end - tile.begin;
  for (int64_t i = 0; i < tile.size(); i++) {
    const float* row = scores + i * ld;
    __m512 top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), factor = _mm512_set1_ps(scale);
    for (int64_t j = 0; j < wide; j += WIDTH)
      top = _mm512_mask_max_ps(top, tile.seen(i, tile.begin + j), top, _mm512_loadu_ps(row + j));
    float largest = _mm512_reduce_max_ps(top) * scale;
    top = _mm512_set1_ps(largest);
    for (int64_t j = 0; j < wide; j += WIDTH) {
      __m512 e = exponential(_mm512_fmsub_ps(_mm512_loadu_ps(row + j), factor, top), ROUGH);
      e = _mm512_maskz_mov_ps(tile.seen(i, tile.begin + j), e);
      sum = _mm512_add_ps(sum, e);
      _mm256_storeu_si256((__m256i*)((Half*)(weights + i * ld / 2) + j), (__m256i)_mm512_cvtneps_pbh(e));
    }
    float total = _mm512_reduce_add_ps(sum);
    inverse[i] = 1.0f / total, lse[i] = largest + std::log(total);
  }
}

// Of the columns j to j + n of a tile: softmax weights w = exp(scale * score - lse) of scores[rows][ld], and from the slopes of w
// in slopes[rows][ld] those of the scores, w (slope - inner) scale. In bfloat16, of neighbouring rows as pairs in panels (weights,
// across: [depth, n]), and the latter also along the rows (along[rows][ld / 2]).
void bend(const float* scores, const float* slopes, int64_t ld, const Tile& tile, int64_t j, int64_t n, float scale,
          const float* lse, const float* inner, Pair* weights, Pair* along, Pair* across, int64_t depth) {
  int64_t rows = tile.size();
  __m512 factor = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < rows; i += 2)
    for (int64_t c = 0; c < n; c += WIDTH) {
      __m512i pair[2] = {}, slope[2] = {};
      for (int64_t k = i; k < std::min(i + 2, rows); k++) {
        __mmask16 seen = tile.seen(k, j + c);
        __m512 score = _mm512_fmsub_ps(_mm512_loadu_ps(scores + k * ld + c), factor, _mm512_set1_ps(lse[k]));
        __m512 weight = _mm512_maskz_mov_ps(seen, exponential(score, ROUGH));
        __m512 far = _mm512_fmsub_ps(_mm512_loadu_ps(slopes + k * ld + c), factor, _mm512_set1_ps(inner[k] * scale));
        pair[k - i] = narrow(weight), slope[k - i] = narrow(_mm512_maskz_mul_ps(seen, weight, far));
        _mm256_storeu_si256((__m256i*)((Half*)(along + k * ld / 2) + c), _mm512_cvtepi32_epi16(slope[k - i]));
      }
      int64_t at = (c / PANEL * depth + i / 2) * PANEL + c % PANEL;
      _mm512_storeu_si512(weights + at, _mm512_or_si512(pair[0], _mm512_slli_epi32(pair[1], 16)));
      _mm512_storeu_si512(across + at, _mm512_or_si512(slope[0], _mm512_slli_epi32(slope[1], 16)));
    }
}

void store(const float* from, int64_t n, float factor, Half* to) {
  for (int64_t j = 0; j < n; j += WIDTH) {
    __m512 x = _mm512_mul_ps(_mm512_loadu_ps(from + j), _mm512_set1_ps(factor));
    _mm256_storeu_si256((__m256i*)(to + j), (__m256i)_mm512_cvtneps_pbh(x));
  }
}

// Adds the columns of x[d][ld], transposed, to the given rows of to[][d], and clears them.
void move(float* x, int64_t ld, int64_t d, const int64_t* rows, int64_t count, float* to) {
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

// Calls use(tile) for each tile of a run and task, of about so many queries.
template <class Use>
void tiles(int64_t task, const Sizes& s, const Runs& runs, int64_t run, int64_t tall, Use use) {
  const int64_t* own = runs.own + runs.own_at[run];
  int64_t n = runs.own_at[run + 1] - runs.own_at[run], step = std::max<int64_t>(1, tall / s.together);
  for (int64_t start = 0; start < n; start += step) {
    int64_t count = std::min(step, n - start), above = runs.length(run) - n + start;
    int64_t begin = s.window ? std::max<int64_t>(0, above - s.window + 1) / PANEL * PANEL : 0;
    Tile tile{{}, begin, up(above + count), s.window};
    for (int64_t h = task * s.together; h < (task + 1) * s.together; h++)
      for (int64_t i = 0; i < count; i++) tile.queries.push_back({h, own[start + i], above + i});
    use(tile);
  }
}

// Rows side by side, [n][d / 2] pairs.
void dense(const Rows& rows, int64_t d, Pair* out) {
  for (size_t i = 0; i < rows.size(); i++) std::memcpy(out + i * d / 2, rows[i], d * sizeof(Half));
}

}  // namespace

// out[queries, heads, dv] in bfloat16, and lse[heads, queries]: the logarithm of the sum of exp(score) over what a query sees.
extern "C" void forward(const Sizes* s, const Runs* runs, const Strided* q, const Strided* k, const Strided* v, Half* out,
                        float* lse) {
  int64_t most = runs->longest();
  parallel(s->heads / s->together, s->threads, [&](int64_t task) {
    int64_t shared = task * s->together / s->groups;
    std::vector<Pair> keys(most * s->d / 2), values(most / 2 * up(s->dv, PANEL)), asked, weights;
    std::vector<float> scores, sums, inverse, lses;
    for (int64_t r = 0; r < runs->count; r++) {
      int64_t count = runs->length(r), from = runs->common(r), ld = up(count);
      const int64_t* fresh = runs->path(r) + from;
      int64_t tall = std::max(s->together, count <= 1024 ? 64 : count <= 4096 ? 32 : WIDTH);
      asked.resize(tall * s->d / 2), weights.resize(tall * ld / 2), scores.resize(tall * ld);
      sums.resize(tall * s->dv), inverse.resize(tall), lses.resize(tall);
      transpose(gather(*k, shared, fresh, count - from), s->d, keys.data() + from * s->d / 2);
      interleave(gather(*v, shared, fresh, count - from), from / 2, s->dv, most / 2, values.data());
      tiles(task, *s, *runs, r, tall, [&](const Tile& t) {
        int64_t n = t.size(), wide = t.end - t.begin;
        dense(t.of(*q), s->d, asked.data());
        product(asked.data(), s->d / 2, keys.data() + t.begin * s->d / 2, s->d / 2, scores.data(), ld, n, wide, s->d / 2);
        softmax(scores.data(), ld, t, s->scale, weights.data(), inverse.data(), lses.data());
        product(weights.data(), ld / 2, values.data() + t.begin / 2 * PANEL, most / 2, sums.data(), s->dv, n, s->dv, wide / 2);
        for (int64_t i = 0; i < n; i++) {
          const Query& query = t.queries[i];
          store(sums.data() + i * s->dv, s->dv, inverse[i], out + (query.row * s->heads + query.head) * s->dv);
          lse[query.head * s->queries + query.row] = lses[i];
        }
      });
    }
  });
}

// d_q[queries, heads, d] in bfloat16; d_k[tasks, keys, d] and d_v[tasks, keys, dv] in float32, added to.
extern "C" void backward(const Sizes* s, const Runs* runs, const Strided* q, const Strided* k, const Strided* v, const Strided* out,
                         const Strided* grad, const float* lse, Half* d_q, float* d_k, float* d_v, int64_t key_rows) {
  constexpr int64_t BLOCK = 2 * PANEL;  // columns whose scores exist at once
  int64_t tall = std::max<int64_t>(s->together, 128), depth = (tall + 1) / 2;
  int64_t most = runs->longest(), ld = most + WIDTH;  // not the length of a page, or all rows would share lines of the cache
  parallel(s->heads / s->together, s->threads, [&](int64_t task) {
    int64_t shared = task * s->together / s->groups;
    std::vector<Pair> keys(most * s->d / 2), values(most * s->dv / 2), rowed(most / 2 * up(s->d, PANEL));
    std::vector<Pair> asked(tall * s->d / 2), sloped(tall * s->dv / 2), ours(depth * s->d), theirs(depth * s->dv);
    std::vector<Pair> along(tall * BLOCK / 2), across(depth * BLOCK), weights(depth * BLOCK);
    std::vector<float> scores(tall * BLOCK), slopes(tall * BLOCK), sums(tall * s->d), by_key(s->d * ld), by_value(s->dv * ld);
    std::vector<float> lses(tall), inner(tall);
    for (int64_t r = 0; r < runs->count; r++) {
      int64_t count = runs->length(r), from = runs->common(r);
      const int64_t* path = runs->path(r);
      auto fresh = gather(*k, shared, path + from, count - from);
      transpose(fresh, s->d, keys.data() + from * s->d / 2);
      interleave(fresh, from / 2, s->d, most / 2, rowed.data());
      transpose(gather(*v, shared, path + from, count - from), s->dv, values.data() + from * s->dv / 2);
      tiles(task, *s, *runs, r, tall, [&](const Tile& t) {
        int64_t n = t.size(), half = (n + 1) / 2;
        Rows query = t.of(*q), slope = t.of(*grad), given = t.of(*out);
        dense(query, s->d, asked.data()), dense(slope, s->dv, sloped.data());
        both(query, s->d, half, ours.data()), both(slope, s->dv, half, theirs.data());
        for (int64_t i = 0; i < n; i++) {
          inner[i] = dot(slope[i], given[i], s->dv);
          lses[i] = lse[t.queries[i].head * s->queries + t.queries[i].row];
        }
        for (int64_t j = t.begin; j < t.end; j += BLOCK) {
          int64_t wide = std::min(BLOCK, t.end - j);
          product(asked.data(), s->d / 2, keys.data() + j * s->d / 2, s->d / 2, scores.data(), BLOCK, n, wide, s->d / 2);
          product(sloped.data(), s->dv / 2, values.data() + j * s->dv / 2, s->dv / 2, slopes.data(), BLOCK, n, wide, s->dv / 2);
          bend(scores.data(), slopes.data(), BLOCK, t, j, wide, s->scale, lses.data(), inner.data(), weights.data(), along.data(),
               across.data(), depth);
          product(theirs.data(), half, weights.data(), depth, by_value.data() + j, ld, s->dv, wide, half, true);
          product(ours.data(), half, across.data(), depth, by_key.data() + j, ld, s->d, wide, half, true);
          product(along.data(), BLOCK / 2, rowed.data() + j / 2 * PANEL, most / 2, sums.data(), s->d, n, s->d, wide / 2, j > t.begin);
        }
        for (int64_t i = 0; i < n; i++) {
          int64_t to = t.queries[i].row * s->heads + t.queries[i].head;
          store(sums.data() + i * s->d, s->d, 1.0f, d_q + to * s->d);
        }
      });
      int64_t stays = r + 1 < runs->count ? runs->common(r + 1) : 0;  // the next run adds to the same sums
      move(by_key.data() + stays, ld, s->d, path + stays, count - stays, d_k + task * key_rows * s->d);
      move(by_value.data() + stays, ld, s->dv, path + stays, count - stays, d_v + task * key_rows * s->dv);
    }
  });
}

// One range of the vocabulary for all rows: logits = hidden[rows, h] weight[columns, h]^T, of which nothing is kept but
// exp(logit - largest of the row) in bfloat16 (kept[rows, columns], may be null), and found[4][rows]: that largest logit, the sum of
// the exponentials, of distance * exponential, and the logit at column target[row] (0 if that is not in the range).
// The weight is bfloat16 (half) or float32, which is rounded.
extern "C" void measure(const Half* hidden, const void* weight, const int64_t* target, float* found, Half* kept, int64_t rows,
                        int64_t columns, int64_t h, float scale, int64_t half, int64_t threads) {
  constexpr int64_t BLOCK = 30;
  int64_t panels = (columns + PANEL - 1) / PANEL, padded = panels * PANEL;
  std::vector<Pair> packed(padded * h / 2);  // [panels][h / 2][PANEL]
  parallel(panels, threads, [&](int64_t p) {
    Pair* out = packed.data() + p * PANEL * h / 2;
    for (int64_t j = 0; j < PANEL; j += WIDTH) {
      auto load = [&](int64_t i, int64_t k, __mmask16 there) {
        int64_t at = std::min(p * PANEL + j + i, columns - 1) * h + 2 * k;
        if (half) return _mm512_maskz_loadu_epi32(there, (const Half*)weight + at);
        const float* row = (const float*)weight + at;
        __m512 rest = there == 0xffff ? _mm512_loadu_ps(row + WIDTH) : _mm512_setzero_ps();
        return (__m512i)_mm512_cvtne2ps_pbh(rest, _mm512_loadu_ps(row));
      };
      turn(h / 2, load, out + j);
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
      found[3 * rows + i] = hit >= 0 && hit < columns ? row[hit] * scale : 0;
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
        __mmask16 there = _cvtu32_mask16(j + WIDTH <= columns ? 0xffff : (1u << std::max<int64_t>(0, columns - j)) - 1);
        __m512 e = _mm512_maskz_mov_ps(there, exponential(distance, EXACT));
        sum = _mm512_add_ps(sum, e);
        mean = _mm512_mask3_fmadd_ps(e, distance, mean, there);
        if (kept) _mm256_mask_storeu_epi16(kept + i * columns + j, there, (__m256i)_mm512_cvtneps_pbh(e));
      }
      found[i] = largest, found[rows + i] = _mm512_reduce_add_ps(sum), found[2 * rows + i] = _mm512_reduce_add_ps(mean);
    }
  });
}
