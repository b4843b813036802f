// vAttention's decode step as one launch: attention over what a list names exactly and
// over a sample of the rest whose size is judged on the way.
//
// A team of thread blocks works on each list. Producer warps fill the ring of the decode
// attention: a pilot sample, then the list's own tiles, then what each look at the sample adds to
// it, and at each look the sample's values once more, for the variance. Four warps sift the sample.
// Consumers sum up exact part and sample, and judge. Sampled keys weigh 1, and a head's sum is
// scaled by what its sample stands for, so sums go on from look to look. A look merges the parts
// in rank order, so the last one leaves the output in every thread block.
//
// A sample is what the list leaves out of the first so many points of the stream's permutation of all
// tokens: as many points as hold the wanted keys on average. Which rows that reads depends on no list, so the
// first of them are asked for while the launch ahead still chooses.
//
// The rules are those of the CPU: the sample grows to what its budget asks, at most twofold
// from one look to the next, until its own budget is no larger than it is; one too noisy to tell
// grows fourfold at most four times; a head that would read `dense_share` of the context, or
// cannot tell, makes its group read everything.
#pragma once

#include "../common/philox.cuh"
#include "../common/team.cuh"
#include "../decode/tile.cuh"

namespace taper {

// kListed: no sample; the lists are all that is read.
enum BudgetRule : int32_t {
  kDenominator = TAPER_DENOMINATOR,
  kLemma = TAPER_LEMMA,
  kTight = TAPER_TIGHT,
  kRatio = TAPER_RATIO,
  kChi2 = TAPER_CHI2,
  kListed = TAPER_LISTED
};
// Everything is read: where no sample keeps the promise, or where there is too little to
// sample from.
enum ListState : uint32_t {
  kSampled = TAPER_SAMPLED,
  kDense = TAPER_DENSE,
  kWhole = TAPER_WHOLE,
  kAsListed = TAPER_AS_LISTED
};

using SampledParams = TaperSampledParams;

constexpr int kNoisyLooks = 5;         // after which a list is read whole
constexpr float kDoubt = 2.f;          // times the limit that a sample below a quarter of it may ask for
constexpr int kCovarianceKeys = 40;    // sampled keys whose products are taken,
constexpr uint32_t kFewPoints = 128;   // among those of so many points at most
constexpr float kLeastSignal = 0.25f;  // of a squared norm, its noise taken off
constexpr uint32_t kMarkWords = 1024;
// Thread blocks of a list's team, by its sequence's length: as it grows, all from so many tokens on. More have less to read each and as
// long to wait for one another, and of the lists of many sequences fewer are read at a time.
constexpr float kWholeTeamTokens = 131072;
__host__ __device__ inline int sampled_team(int list_heads, int64_t len) {
  const int most = team_size(list_heads), wanted = (int)ceilf((float)len * (1.f / kWholeTeamTokens) * most);
  return wanted < 1 ? 1 : wanted < most ? wanted : most;
}
constexpr int kSieveThreads = 128;
constexpr uint32_t kSieved = 8;      // tiles sifted and not read yet; even
constexpr uint32_t kLeadTiles = 2;   // tiles of a rank's sample that come first; may be asked for before the launch ahead has ended

// What every thread of a team knows of its list.
struct Outline {
  WorkList w;
  uint32_t list, rank, team, inverse, residual;
  uint32_t slot;      // the list's, in scratch of which a list has as much whatever its team
  uint32_t room;      // members that a list has room for there
  bool scout;         // the list is made up, for its code alone
  uint32_t points;    // that the first look takes
  uint32_t lead;      // the first tiles of this rank's sample, which come before the list's own
  uint32_t exact;     // tile of the list that this rank reads, and then every team-th; of the sample the rank-th, and so on
  uint32_t row, head, kv_head, position;
  uint64_t seed;
  const uint32_t* table;
  const void* near;  // the list's part of near_values, or null
  bool few_near;     // it has room for all points that the first few keys are among
  float limit;    // sampled keys from which reading everything is the better bargain
  uint32_t most;  // the least whole number of them that reaches it
  bool dense;     // from the start: no sample can help

  // x / team for x below 2^27: a division costs as much as a look-up in memory, and looks have many.
  __device__ __forceinline__ void set_team(uint32_t n) { team = n, inverse = 0xFFFFFFFFu / n + 1; }
  __device__ __forceinline__ uint32_t over_team(uint32_t x) const { return team == 1 ? x : __umulhi(x, inverse); }
  // How many of `tiles` are dealt to who takes the `from`-th and then every team-th.
  __device__ __forceinline__ uint32_t share_of(uint32_t tiles, uint32_t from) const {
    return tiles > from ? over_team(tiles - from + team - 1) : 0;
  }
  // Whether tiles that were asked for of a sequence of so many tokens are the sample's.
  __device__ __forceinline__ bool hold(uint32_t len) const { return !dense && w.len == len; }
  // Points that hold `keys` of the sample on average.
  __device__ __forceinline__ uint32_t points_of(uint32_t keys) const {
    return (uint32_t)min(((uint64_t)keys * w.len + residual - 1) / residual, (uint64_t)w.len);
  }
};

// The most that a sample of b grows to at once.
__device__ __forceinline__ uint32_t grown(uint32_t b) { return 2 * b; }

struct Decision {
  uint32_t state;  // 0: the sample grows
  uint32_t count;  // sampled keys that are read, or points to look at next
};

// Points [from, to) as tiles of 64: those of a number that `from` or `to` cuts are read in part,
// and again in part by the next run. One rank reads every part of a tile.
struct Run {
  const Outline& o;
  uint32_t from, to;
  __device__ __forceinline__ Run(const Outline& o, uint32_t from, uint32_t to) : o(o), from(from), to(to) {}
  __device__ __forceinline__ uint32_t end() const { return (to + kBlock - 1) / kBlock; }
  __device__ __forceinline__ uint32_t skipped() const { return o.share_of(from / kBlock, o.rank); }
  __device__ __forceinline__ uint32_t tiles() const { return o.share_of(end(), o.rank) - skipped(); }
  // The rank's first tile.
  __device__ __forceinline__ uint32_t first() const { return o.rank + skipped() * o.team; }
};

template <int D, int N>
inline constexpr int kSampledStages = N == 16 ? kDecodeStages<D> - kDecodeStages<D> / 3
                                              : kDecodeStages<D>;

// What the parts say of a head, with the sampled weights e = exp(score - lse) in units of
// their sum: squares and products of the estimated output o and of the sample's mean less
// it, the square of that mean, the inverse of the denominator, and the estimate's log-sum-exp.
struct alignas(16) HeadStat {
  float lse, o2, ow, w2, inverse, a2, all;
};

template <int D, int N>
struct SampledShared : DecodeShared<D, N, kSampledStages<D, N>> {
  uint64_t sieved[kSieved], used[kSieved], placed, decided, heeded, heard, gate, sieve_gate, brought;
  Outline outline;
  uint32_t last;
  Decision decision;
  uint32_t early, early_len;       // tiles that were asked for early, and the tokens that the sequence was taken to have
  uint32_t passes[kSieved][2];     // a bit for each of a tile's points: whether the list leaves it out
  uint32_t passed[2], drawn;       // such points of a warpgroup's tiles since the last look; the team's
  uint32_t chosen[kMarkWords];     // bitmap of the first blocks or pages, or ids of single tokens
  union {
    float merged[2][N][D];  // exact part and sample, over the team
    float pair[kCovarianceKeys][N][4];  // of a key, e in units of their mean: e, v . o, r . mean and |r - mean|^2
  };
  // The sample's first few keys: their points and rows, and how many there are.
  uint32_t few_points[kCovarianceKeys], few_rows[kCovarianceKeys], few_placed, few_kept[kSieveThreads / 32];
  float merged_lse[2][N];
  HeadStat stat[N];
  alignas(16) float sums[8][N][4];
  float budget[N];
  uint32_t verdict[N];
};

// The estimated outputs, then the samples' means less them, as the other sides of products with
// values: of each the values in rows 0 to N and their remainders in rows N to 2 N, a head a row.
template <int D, int N>
inline constexpr int kSplitBytes = 4 * N * D * 2;
template <int D, int N>
__device__ __forceinline__ uint32_t split_at(int kind, int row, int d) {
  return kind * (kSplitBytes<D, N> / 2) + d / 64 * (2 * N * 128) + swizzled(row, d % 64 / 8) + d % 8 * 2;
}
// One query buffer instead of two, and the products' other side.
template <int D, int N>
inline constexpr int kSampledBytes =
    DecodeLayout<D, N, kSampledStages<D, N>>::kBytes - DecodeLayout<D, N>::kQuery + kSplitBytes<D, N>;

}  // namespace taper
