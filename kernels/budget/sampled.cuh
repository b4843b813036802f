// vAttention's decode step as one launch: attention over what a list names exactly and
// over a sample of the rest whose size is judged on the way.
//
// A team of thread blocks works on each list. Producer warps fill the ring of the decode
// attention: a pilot sample, then the list's own tiles, then what each look at the sample adds to
// it. Four warps sift the sample. Consumers sum up exact part and sample, and judge. Sampled keys
// weigh 1, and a head's sum is scaled by what its sample stands for, so sums go on from look to
// look. At a look the team meets once: each thread block tells its parts, merges all in rank order
// and comes to the same decision, so the last look leaves the output in every one.
//
// With e a sampled key's weight, v its value and o the estimated output, the variance is that of
// e (v - o), and sum e^2 |v - o|^2 = sum e^2 |v|^2 - 2 o . sum e^2 v + |o|^2 sum e^2: three sums that
// need no o, of the same rounded e^2, so that what cancels does.
//
// A sample is what the list leaves out of the first so many points of the stream's permutation of all
// tokens: as many points as hold the wanted keys on average. Which rows that reads depends on no list, so the
// first of them are asked for while the launch ahead still chooses.
//
// The rules are those of the CPU: the sample grows towards what its budget asks from one look to the next, until its
// own budget is no larger than it is; one too noisy to tell grows fourfold at most four times; a head that would read
// `dense_share` of the context, or cannot tell, makes its group read everything.
#pragma once

#include "../common/philox.cuh"
#include "../common/team.cuh"
#include "../decode/tile.cuh"

namespace taper {

enum BudgetRule : int32_t {
  kDenominator = TAPER_DENOMINATOR,
  kLemma = TAPER_LEMMA,
  kTight = TAPER_TIGHT,
  kRatio = TAPER_RATIO,
  kChi2 = TAPER_CHI2
};
// Everything is read: where no sample keeps the promise, or where there is too little to
// sample from.
enum ListState : uint32_t {
  kSampled = TAPER_SAMPLED,
  kDense = TAPER_DENSE,
  kWhole = TAPER_WHOLE
};

using SampledParams = TaperSampledParams;

constexpr int kNoisyLooks = 5;         // after which a list is read whole
constexpr float kDoubt = 2.f;          // times the limit that a sample below a quarter of it may ask for
constexpr int kCovarianceKeys = 40;    // sampled keys whose products are taken,
constexpr uint32_t kFewPoints = 128;   // among those of so many points at most
constexpr float kLeastSignal = 0.25f;  // of a squared norm, its noise taken off
constexpr uint32_t kMarkWords = 1024;
// Thread blocks of a list's team, by its sequence's length: as it grows, all from so many tokens on. More have less to
// read each and as long to wait for one another, and of the lists of many sequences fewer are read at a time.
constexpr float kWholeTeamTokens = 131072;
__host__ __device__ inline int sampled_team(int list_heads, int64_t len) {
  const int most = team_size(list_heads), wanted = (int)ceilf((float)len * (1.f / kWholeTeamTokens) * most);
  return wanted < 1 ? 1 : wanted < most ? wanted : most;
}
constexpr int kSieveThreads = 128;  // a thread for each of the few points
static_assert(kSieveThreads == kFewPoints);
constexpr uint32_t kSieved = 8;      // tiles sifted and not read yet; even
constexpr uint32_t kLeadTiles = 2;   // tiles of a rank's sample that come first; may be asked for before the launch ahead has ended

// A thread block's place in its list's team, and where its keys and values lie.
struct Seat {
  uint32_t rank, team, inverse, kv_head;
  const uint32_t* table;

  // x / team for x below 2^27: a division costs as much as a look-up in memory, and looks have many.
  __device__ __forceinline__ void set_team(uint32_t n) { team = n, inverse = 0xFFFFFFFFu / n + 1; }
  __device__ __forceinline__ uint32_t over_team(uint32_t x) const { return team == 1 ? x : __umulhi(x, inverse); }
  // How many of `tiles` are dealt to who takes the `from`-th and then every team-th.
  __device__ __forceinline__ uint32_t share_of(uint32_t tiles, uint32_t from) const {
    return tiles > from ? over_team(tiles - from + team - 1) : 0;
  }
  // The first that this rank takes of tiles that are dealt out from where `before` others end.
  __device__ __forceinline__ uint32_t first_behind(uint32_t before) const {
    const uint32_t last = before - over_team(before) * team;
    return rank >= last ? rank - last : rank + team - last;
  }
};

// What every thread of a team knows of its list.
struct Outline : Seat {
  WorkList w;
  uint32_t list, residual;
  uint32_t slot;      // the list's, in scratch of which a list has as much whatever its team
  uint32_t room;      // members that a list has room for there
  bool scout;         // the list is made up, for its code alone
  uint32_t points;    // that the first look takes
  uint32_t lead;      // the first tiles of this rank's sample, which come before the list's own
  uint32_t exact;     // tile of the list that this rank reads, and then every team-th; of the sample the rank-th, and so on
  uint32_t row, head, position;
  uint64_t seed;
  float limit;    // sampled keys from which reading everything is the better bargain
  uint32_t most;  // the least whole number of them that reaches it
  bool dense;     // from the start: no sample can help

  // Whether tiles that were asked for of a sequence of so many tokens are the sample's.
  __device__ __forceinline__ bool hold(uint32_t len) const { return !dense && w.len == len; }
  // Points that hold `keys` of the sample on average.
  __device__ __forceinline__ uint32_t points_of(uint32_t keys) const {
    return (uint32_t)min(((uint64_t)keys * w.len + residual - 1) / residual, (uint64_t)w.len);
  }
};

// Where those tiles of a sample end that come before the list's own: the whole ones that a first look takes whatever the list
// reads, so that they follow from the sequence's length alone.
__device__ __forceinline__ uint32_t lead_end(const SampledParams& p, uint32_t len) {
  const uint32_t least = max((uint32_t)max(p.pilot_tokens, 2), (uint32_t)(p.pilot_share * len));
  return min((least + kBlock - 1) / kBlock, len / kBlock);
}

// What a sample of b grows to at once where its budget asks for so many keys.
__device__ __forceinline__ uint32_t grown(const SampledParams& p, uint32_t b, uint32_t asked) {
  const float some = fminf(p.growth_share * asked, p.growth_most * b);
  return min(asked, max(2 * b, (uint32_t)some));
}

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
// their sum. First what is summed over the values' dimensions: squares and products of the
// estimated output o and of the sample's mean less it, the square of that mean, and o . sum e^2 v.
// Then the sums of e^2 and of e^2 |v|^2, and the largest e^2 |v|^2; and the sample's log-sum-exp, the inverse of the
// denominator, the estimate's log-sum-exp, and the largest e^2.
struct alignas(16) HeadStat {
  float o2, ow, w2, a2, oe, e2, v2, most_v;
  float lse, inverse, all, most;
};

template <int D, int N>
struct SampledShared : DecodeShared<D, N, kSampledStages<D, N>> {
  uint64_t sieved[kSieved], used[kSieved], placed, read, outlined, decided, heeded, gate, sieve_gate;
  Outline outline;
  uint32_t last;
  Decision decision;
  bool any;                        // whether the block has a list
  uint32_t early, early_len;       // tiles that were asked for early, and the tokens that the sequence was taken to have
  alignas(16) WorkList lists[4];   // what each warp of the producers reads
  uint32_t passes[kSieved][2];     // a bit for each of a tile's points: whether the list leaves it out
  uint32_t passed[2], drawn;       // such points of a warpgroup's tiles since the last look; the team's
  uint32_t chosen[kMarkWords];     // bitmap of the first blocks or pages, or ids of single tokens
  // The sample's first few keys: their points and rows, and how many there are.
  uint32_t few_points[kCovarianceKeys], few_rows[kCovarianceKeys], few_kept[kSieveThreads / 32], few_placed;
  float warp_sums[2][4][N][8];  // of exact part and sample: sums, sums of squares, alone and with norms, the largest of each; two maxima
  HeadStat stat[2][N];  // by the halves of the dimensions
  float pairs[N][2][2];  // of a head's tiles, or of every other one: the two sums
};

// What a look works with, where tiles were. A warpgroup's own sums of exact part, sample and its squares: in the ring's first
// stage that is its own, since the other may still read tiles;
template <int D, int N>
using Joined = float[3][N][D + 4];
// and from the third on what there is once all have met.
template <int D, int N>
struct LookRoom {
  // The estimated outputs, then the samples' means less them, as the other side of a product with
  // values: of each the values in N rows and then their remainders, a head a row, in panels of 64.
  uint16_t split[D / 64][4 * N][64];
  // Of the first few keys: products of their values, and, e in units of their mean, each one's e, v . o, r . mean and
  // |r - mean|^2.
  float gram[kCovarianceKeys][kCovarianceKeys], pair[N][kCovarianceKeys][4];
};
template <int D, int N>
__device__ __forceinline__ uint32_t split_at(int row, int d) {
  return d / 64 * (4 * N * 128) + swizzled(row, d % 64 / 8) + d % 8 * 2;
}

// Beside the stages: one query buffer, the first few keys' values, and probabilities and their squares. Products read
// 64 rows of those values, what follows the last of them too.
constexpr int kFewPanel = kCovarianceKeys * 128;
template <int D, int N>
inline constexpr int kSampledBytes = DecodeLayout<D, N, kSampledStages<D, N>>::kBytes - DecodeLayout<D, N>::kQuery +
                                     2 * DecodeLayout<D, N>::kProb + D / 64 * kFewPanel;

}  // namespace taper
