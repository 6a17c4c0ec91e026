// Attention along the paths of a forest, and the head's log-softmax, for bfloat16 on processors that multiply it (AVX-512 BF16).
//
// Every product is one routine: C[M, N] = A[M, K] B[K, N] in float32, where bfloat16 numbers that are neighbours along K lie
// together in one 32-bit word ("pairs"): A[M][K/2], B[K/2][N]. Heads (of the head: rows) are independent tasks, so results do
// not depend on the number of threads. Scores of a tile of queries are kept whole, so a plain softmax will do; the backward
// pass computes them again.

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

// Packs 16 rows of ``pairs`` pairs (a multiple of 8) as 16 columns of a panel; load(i, k, mask) gives pairs k to k + 16 of row i.
template <class Load>
void turn(int64_t pairs, Load load, Pair* out) {
  for (int64_t k = 0; k < pairs; k += WIDTH) {
    int64_t left = std::min(WIDTH, pairs - k);
    __m512i rows[WIDTH];
    for (int64_t i = 0; i < WIDTH; i++) rows[i] = load(i, k, __mmask16((1u << left) - 1));
    transpose16(rows);
    for (int64_t i = 0; i < left; i++) _mm512_storeu_si512(out + (k + i) * PANEL, rows[i]);
  }
}

// exp(x) for x <= 0, to a relative error of 2e-7: 2^n times a polynomial in what is left of x / ln 2.
__m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-100.0f), x);  // in this order a NaN stays one
  __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  for (float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(term));
  return _mm512_scalef_ps(p, n);
}

struct Strided {  // [heads, rows, D] of bfloat16, whose last axis is dense
  const Half* data;
  int64_t head, row;
  const Half* at(int64_t h, int64_t r) const { return data + h * head + r * row; }
};

const Half ZEROS[1024] = {};  // what stands for rows beyond the last

// Rows next to each other as pairs, for products over rows: [rows / 2, D] in panels.
void interleave(const std::vector<const Half*>& rows, int64_t padded, int64_t d, Pair* out) {
  for (int64_t k = 0; k < padded; k += 2) {
    const Half *low = k < int64_t(rows.size()) ? rows[k] : ZEROS, *high = k + 1 < int64_t(rows.size()) ? rows[k + 1] : ZEROS;
    for (int64_t j = 0; j < d; j += PANEL)
      for (int64_t i = j; i < std::min(d, j + PANEL); i++)
        out[j * (padded / 2) + k / 2 * PANEL + i - j] = Pair(low[i]) | Pair(high[i]) << 16;
  }
}

// Transposed, numbers next to each other as pairs, for products over D: [D / 2, rows] in panels.
void transpose(const std::vector<const Half*>& rows, int64_t padded, int64_t d, Pair* out) {
  for (int64_t r = 0; r < padded; r += WIDTH) {
    const Half* from[WIDTH];
    for (int64_t i = 0; i < WIDTH; i++) from[i] = r + i < int64_t(rows.size()) ? rows[r + i] : ZEROS;
    auto load = [&](int64_t i, int64_t k, __mmask16 there) { return _mm512_maskz_loadu_epi32(there, (const Pair*)from[i] + k); };
    turn(d / 2, load, out + r / PANEL * PANEL * (d / 2) + r % PANEL);
  }
}

// Interleaved and transposed: out[D][padded / 2] holds rows 2k and 2k + 1 as pairs.
void both(const std::vector<const Half*>& rows, int64_t padded, int64_t d, Pair* out) {
  for (int64_t k = 0; k < padded; k += 2)
    for (int64_t i = 0; i < d; i++) {
      Pair low = k < int64_t(rows.size()) ? rows[k][i] : 0, high = k + 1 < int64_t(rows.size()) ? rows[k + 1][i] : 0;
      out[i * (padded / 2) + k / 2] = low | high << 16;
    }
}

struct Sizes {
  int64_t heads, groups, together, d, dv, window, threads;  // a task runs ``together`` of the ``groups`` heads that share keys
  float scale;
};

struct Runs {  // queries of run r: own[own_at[r] .. own_at[r + 1]); keys of its path: keys[key_at[r] .. key_at[r + 1])
  int64_t count;
  const int64_t *own, *own_at, *keys, *key_at;
};

// A tile of queries of one run and head: its rows, the keys that come before the first, and those that its products cover.
struct Tile {
  std::vector<const Half*> rows;
  int64_t above, padded;
};

int64_t tile_rows(int64_t keys) { return keys <= 1024 ? 64 : keys <= 4096 ? 32 : 16; }

// Turns scores[n][ld] into softmax weights over the keys that each query sees; those it does not see become 0.
void softmax(float* scores, int64_t ld, const Tile& tile, const Sizes& s) {
  for (int64_t i = 0; i < int64_t(tile.rows.size()); i++) {
    float* row = scores + i * ld;
    int64_t last = tile.above + i, first = s.window ? std::max<int64_t>(0, last - s.window + 1) : 0;
    std::fill(row, row + first, -INFINITY);
    std::fill(row + last + 1, row + tile.padded, -INFINITY);
    __m512 top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), scale = _mm512_set1_ps(s.scale);
    for (int64_t j = 0; j < tile.padded; j += WIDTH) top = _mm512_max_ps(top, _mm512_loadu_ps(row + j));
    top = _mm512_set1_ps(_mm512_reduce_max_ps(top) * s.scale);
    for (int64_t j = 0; j < tile.padded; j += WIDTH) {
      __m512 raw = _mm512_loadu_ps(row + j);
      __mmask16 seen = _mm512_cmp_ps_mask(raw, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
      __m512 e = _mm512_maskz_mov_ps(seen, exponential(_mm512_fmsub_ps(raw, scale, top)));
      sum = _mm512_add_ps(sum, e);
      _mm512_storeu_ps(row + j, e);
    }
    __m512 inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
    for (int64_t j = 0; j < tile.padded; j += WIDTH) _mm512_storeu_ps(row + j, _mm512_mul_ps(_mm512_loadu_ps(row + j), inverse));
  }
}

// bfloat16 of x[n][ld]: along the rows as they are, [n][ld / 2] pairs, and (unless null) of neighbouring rows as pairs, [depth, ld] in
// panels.
void halves(const float* x, int64_t ld, int64_t n, int64_t used, Pair* along, Pair* across = nullptr, int64_t depth = 0) {
  for (int64_t i = 0; i < n; i += 2) {
    const float *one = x + i * ld, *two = one + ld;
    bool last = i + 1 == n;
    for (int64_t j = 0; j < used; j += WIDTH) {
      __m512i low = narrow(_mm512_loadu_ps(one + j)), high = last ? _mm512_setzero_si512() : narrow(_mm512_loadu_ps(two + j));
      _mm256_storeu_si256((__m256i*)((Half*)(along + i * ld / 2) + j), _mm512_cvtepi32_epi16(low));
      if (!last) _mm256_storeu_si256((__m256i*)((Half*)(along + (i + 1) * ld / 2) + j), _mm512_cvtepi32_epi16(high));
      __m512i pairs = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
      if (across) _mm512_storeu_si512(across + (j / PANEL * depth + i / 2) * PANEL + j % PANEL, pairs);
    }
  }
}

void store(const float* from, int64_t n, Half* to) {
  for (int64_t j = 0; j < n; j += WIDTH)
    _mm256_storeu_si256((__m256i*)(to + j), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + j)));
}

// Adds x[d][ld], transposed, to the given rows of to[][d].
void add(const float* x, int64_t ld, int64_t d, const int64_t* rows, int64_t count, float* to) {
  for (int64_t j = 0; j < count; j += WIDTH)
    for (int64_t i = 0; i < d; i += WIDTH) {
      __m512i turned[WIDTH];
      for (int64_t k = 0; k < WIDTH; k++) turned[k] = _mm512_loadu_si512(x + (i + k) * ld + j);
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

std::vector<const Half*> gather(const Strided& x, int64_t head, const int64_t* rows, int64_t count) {
  std::vector<const Half*> found(count);
  for (int64_t i = 0; i < count; i++) found[i] = x.at(head, rows[i]);
  return found;
}

// The tiles of a run in some heads: calls use(tile, its rows, head) for each.
template <class Use>
void tiles(const Strided& q, int64_t first, int64_t heads, const Runs& runs, int64_t run, Use use) {
  const int64_t* own = runs.own + runs.own_at[run];
  int64_t n = runs.own_at[run + 1] - runs.own_at[run], keys = runs.key_at[run + 1] - runs.key_at[run], above = keys - n;
  int64_t step = tile_rows(keys);
  for (int64_t h = first; h < first + heads; h++)
    for (int64_t start = 0; start < n; start += step) {
      int64_t count = std::min(step, n - start);
      use(Tile{gather(q, h, own + start, count), above + start, up(above + start + count)}, own + start, h);
    }
}

// Rows side by side, [n][d / 2] pairs.
void dense(const std::vector<const Half*>& rows, int64_t d, Pair* out) {
  for (size_t i = 0; i < rows.size(); i++) std::memcpy(out + i * d / 2, rows[i], d * sizeof(Half));
}

}  // namespace

// out[rows, heads, dv] in bfloat16.
extern "C" void forward(const Sizes* s, const Runs* runs, const Strided* q, const Strided* k, const Strided* v, Half* out) {
  parallel(s->heads / s->together, s->threads, [&](int64_t task) {
    int64_t shared = task * s->together / s->groups;
    std::vector<Pair> keys, values, asked, weights;
    std::vector<float> scores, sums(64 * s->dv);
    for (int64_t r = 0; r < runs->count; r++) {
      int64_t count = runs->key_at[r + 1] - runs->key_at[r], ld = up(count), step = tile_rows(count);
      const int64_t* path = runs->keys + runs->key_at[r];
      keys.resize(s->d / 2 * up(ld, PANEL)), values.resize(ld / 2 * up(s->dv, PANEL)), asked.resize(step * s->d / 2);
      weights.resize(step * ld / 2), scores.resize(step * ld);
      transpose(gather(*k, shared, path, count), ld, s->d, keys.data());
      interleave(gather(*v, shared, path, count), ld, s->dv, values.data());
      tiles(*q, task * s->together, s->together, *runs, r, [&](const Tile& t, const int64_t* own, int64_t h) {
        int64_t n = t.rows.size();
        dense(t.rows, s->d, asked.data());
        product(asked.data(), s->d / 2, keys.data(), s->d / 2, scores.data(), ld, n, t.padded, s->d / 2);
        softmax(scores.data(), ld, t, *s);
        halves(scores.data(), ld, n, t.padded, weights.data());
        product(weights.data(), ld / 2, values.data(), ld / 2, sums.data(), s->dv, n, s->dv, t.padded / 2);
        for (int64_t i = 0; i < n; i++) store(sums.data() + i * s->dv, s->dv, out + (own[i] * s->heads + h) * s->dv);
      });
    }
  });
}

// d_q[rows, heads, d] in bfloat16; d_k[tasks, keys, d] and d_v[tasks, keys, dv] in float32, added to.
extern "C" void backward(const Sizes* s, const Runs* runs, const Strided* q, const Strided* k, const Strided* v, const Strided* out,
                         const Strided* grad, Half* d_q, float* d_k, float* d_v, int64_t key_rows) {
  parallel(s->heads / s->together, s->threads, [&](int64_t task) {
    int64_t shared = task * s->together / s->groups;
    std::vector<Pair> keys, values, rowed, asked, sloped, ours, theirs, along, across, above;
    std::vector<float> scores, slopes, sums(64 * s->d), by_key, by_value;
    for (int64_t r = 0; r < runs->count; r++) {
      int64_t count = runs->key_at[r + 1] - runs->key_at[r], ld = up(count), step = tile_rows(count);
      const int64_t* path = runs->keys + runs->key_at[r];
      int64_t wide = up(ld, PANEL);
      keys.resize(s->d / 2 * wide), values.resize(s->dv / 2 * wide), rowed.resize(ld / 2 * up(s->d, PANEL));
      asked.resize(step * s->d / 2), sloped.resize(step * s->dv / 2), ours.resize(step / 2 * s->d), theirs.resize(step / 2 * s->dv);
      along.resize(step * ld / 2), across.resize(step / 2 * wide), above.resize(step / 2 * wide);
      scores.resize(step * ld), slopes.resize(step * ld);
      by_key.assign(s->d * ld, 0.0f), by_value.assign(s->dv * ld, 0.0f);
      auto path_keys = gather(*k, shared, path, count);
      transpose(path_keys, ld, s->d, keys.data());
      interleave(path_keys, ld, s->d, rowed.data());
      transpose(gather(*v, shared, path, count), ld, s->dv, values.data());
      tiles(*q, task * s->together, s->together, *runs, r, [&](const Tile& t, const int64_t* own, int64_t h) {
        int64_t n = t.rows.size(), even = (n + 1) / 2 * 2;
        auto slope = gather(*grad, h, own, n);
        dense(t.rows, s->d, asked.data()), dense(slope, s->dv, sloped.data());
        both(t.rows, even, s->d, ours.data()), both(slope, even, s->dv, theirs.data());
        product(asked.data(), s->d / 2, keys.data(), s->d / 2, scores.data(), ld, n, t.padded, s->d / 2);
        softmax(scores.data(), ld, t, *s);
        halves(scores.data(), ld, n, t.padded, along.data(), across.data(), step / 2);
        product(sloped.data(), s->dv / 2, values.data(), s->dv / 2, slopes.data(), ld, n, t.padded, s->dv / 2);
        for (int64_t i = 0; i < n; i++) {
          float inner = dot(slope[i], out->at(h, own[i]), s->dv);
          float *weight = scores.data() + i * ld, *found = slopes.data() + i * ld;
          for (int64_t j = 0; j < t.padded; j++) found[j] = weight[j] * (found[j] - inner) * s->scale;
        }
        product(theirs.data(), even / 2, across.data(), step / 2, by_value.data(), ld, s->dv, t.padded, even / 2, true);
        halves(slopes.data(), ld, n, t.padded, along.data(), above.data(), step / 2);
        product(ours.data(), even / 2, above.data(), step / 2, by_key.data(), ld, s->d, t.padded, even / 2, true);
        product(along.data(), ld / 2, rowed.data(), ld / 2, sums.data(), s->d, n, s->d, t.padded / 2);
        for (int64_t i = 0; i < n; i++) store(sums.data() + i * s->d, s->d, d_q + (own[i] * s->heads + h) * s->d);
      });
      add(by_key.data(), ld, s->d, path, count, d_k + task * key_rows * s->d);
      add(by_value.data(), ld, s->dv, path, count, d_v + task * key_rows * s->dv);
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
        __m512 e = _mm512_maskz_mov_ps(there, exponential(distance));
        sum = _mm512_add_ps(sum, e);
        mean = _mm512_mask3_fmadd_ps(e, distance, mean, there);
        if (kept) _mm256_mask_storeu_epi16(kept + i * columns + j, there, (__m256i)_mm512_cvtneps_pbh(e));
      }
      found[i] = largest, found[rows + i] = _mm512_reduce_add_ps(sum), found[2 * rows + i] = _mm512_reduce_add_ps(mean);
    }
  });
}
