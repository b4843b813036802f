// The C interface of the GPU kernels: every entry point and its parameters.
//
// All pointers are device addresses (or pinned host memory that the device can read) unless
// said otherwise. An entry point queues its launches on `stream` and returns a cudaError_t: 0,
// cudaErrorInvalidValue for shapes it does not take, or what the launch said. It keeps
// nothing from call to call, allocates nothing and never waits, so calls may be captured in a
// graph; the parameters are read before it returns. Fields called `reserved` are 0. "Zero before and
// after" is scratch that the caller zeroes once and a launch leaves zeroed; it must not be
// shared by launches that may run at the same time.
//
// A launch may start before its predecessor in the stream has ended; it waits itself before it
// reads what that one wrote. A predecessor that is not of this library is safe too: the launch
// then starts when that one has ended.
//
// Caches are [blocks, kv_heads, 64, head_dim], blocks of 64 tokens named by block tables.
// head_dim is 64 or 128; a group, the query heads that share a list, has at most 16.
#ifndef TAPER_GPU_H
#define TAPER_GPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* TaperStream;  // cudaStream_t

enum { TAPER_BF16 = 0, TAPER_F16 = 1 };  // dtype
enum { TAPER_BLOCKS = 0, TAPER_TOKENS = 1 };                             // PickParams: target
enum { TAPER_MAX_OF_GROUP = 0, TAPER_SUM_OF_GROUP = 1 };                 // GroupSelectParams: reduce
enum { TAPER_MAX_SHARE_OF_GROUP = 2 };                                   // PickParams: reduce, besides those
enum { TAPER_BY_COUNT = 0, TAPER_BY_SCORE = 1 };                         // GroupSelectParams: mass
enum { TAPER_DENOMINATOR = 0, TAPER_LEMMA, TAPER_TIGHT, TAPER_RATIO, TAPER_CHI2 };  // SampledParams: rule
enum { TAPER_SAMPLED = 1, TAPER_DENSE = 2, TAPER_WHOLE = 3 };                       // SampledParams: state
enum { TAPER_SYSTEMATIC = 0, TAPER_STRATIFIED = 1, TAPER_INDEPENDENT = 2, TAPER_PER_TILE = 3,
       TAPER_LARGEST_REMAINDER = 4 };  // ValuesParams: rule, but for the last; SpreadParams: spread

// Thread blocks that share a list (`team` below): 128 / list_heads, within 1 and 32.
static inline int32_t taper_team(int32_t list_heads) {
  const int32_t n = 128 / list_heads;
  return n < 1 ? 1 : n > 32 ? 32 : n;
}

// --- Work lists and decode attention (K1), merge (K2) --------------------------

// Ids are logical positions in the sequence.
typedef struct TaperWorkList {
  uint32_t begin[2], end[2];          // token ranges; empty where end <= begin
  uint32_t block_first, block_count;  // slice of block_ids
  uint32_t token_first, token_count;  // slice of token_ids
  // Slice of token_ids in drawing order, of which every query head reads a prefix of its
  // own length with its own log weight.
  uint32_t sample_first, sample_count;
  float block_ln_weight, token_ln_weight;
  uint32_t len;  // visible tokens of the sequence, bounds its last block
  uint32_t reserved[3];
} TaperWorkList;

// A run of tiles of one list, with a copy of the list: one load tells a producer all.
typedef struct TaperUnit {
  uint32_t list, tile_begin, tile_end, table;
  TaperWorkList work;
} TaperUnit;

typedef struct TaperDecodeParams {
  const void* q;                 // [rows, q_heads, head_dim]
  const void* k;                 // [blocks, kv_heads, 64, head_dim]
  const void* v;                 // as k
  const uint32_t* block_table;   // [rows, table_stride]
  const TaperWorkList* lists;    // [rows, list_heads]
  const uint32_t* block_ids;     // pool that the lists slice
  const uint32_t* token_ids;     // pool that the lists slice; of pages: see token_shift
  const float* token_ln_weight;  // beside token_ids, added to the list's own; may be null
  const uint32_t* head_counts;   // [rows, q_heads], sampled tokens that each head reads
  const float* head_ln_weight;   // [rows, q_heads], their log weight
  TaperUnit* units;              // [unit_capacity], by the plan; null: the attention cuts the lists itself, at most 512
  uint32_t* list_units;          // [lists + 1], first unit of each list; the last is the total
  float* part_o;                 // [unit_capacity, group, head_dim]
  float* part_lse;               // [unit_capacity, group]
  int64_t blocks;                // of the cache
  int32_t rows, q_heads, kv_heads, list_heads, head_dim, dtype;
  int32_t table_stride, unit_capacity;
  float scale;
  int32_t gather;   // 0 promises that no list names single tokens
  // Each of token_ids stands for a page of 2^token_shift tokens, at most 64, and slices count tokens. Lists
  // of pages name no blocks and no sample.
  int32_t token_shift;
  // Query rows of one sequence that share a list: 0 or 1: one. With more q is [rows * fold, q_heads, head_dim], the heads
  // of a list are the group of each of its rows, one row after the other, at most 32 in all, and every list is one range
  // that ends where the last row's tokens end: each row before it sees one token less. Partial results are
  // [unit_capacity, fold * group].
  int32_t fold;
  int32_t team;  // thread blocks of the largest team, set by entry points that form some
} TaperDecodeParams;

typedef struct TaperMergeParams {
  const float* part_o;         // [units, group, head_dim]
  const float* part_lse;       // [units, group]
  const uint32_t* list_units;  // [lists + 1]
  void* out;                   // [rows, q_heads, head_dim], dtype or f32
  float* lse;                  // [rows, q_heads] or null
  const float* base_o;         // [rows, q_heads, head_dim], one more partial; or null
  const float* base_lse;       // [rows, q_heads]
  int32_t rows, q_heads, list_heads, head_dim, dtype;  // rows: of queries
  int32_t out_f32;
  int32_t fold;  // as of the attention
  const TaperWorkList* lists;  // of an attention that cut them itself, in place of list_units; or null
} TaperMergeParams;

// Cuts lists into units: once for each change of the lists, not for each layer.
int taper_decode_plan(const TaperDecodeParams* p, TaperStream stream);
// Partial results of all units. With a scale of 0 the log weights alone decide: attention with
// given weights.
int taper_decode(const TaperDecodeParams* p, TaperStream stream);
// Partial results to outputs.
int taper_merge(const TaperMergeParams* p, TaperStream stream);

// --- A sampled decode step in one launch (vAttention) ---------------------------

typedef struct TaperSampledParams {
  // What is read exactly: `lists` with ascending, disjoint blocks and tokens and no
  // sample. part_o, part_lse: [lists, 3, team, group(, head_dim)], scratch; teams are 128 / list_heads, at most 32, here
  // and below, though those of short lists are smaller. No units; unit_capacity is set by the entry point.
  TaperDecodeParams d;
  const uint64_t* seeds;      // [rows]
  const uint32_t* positions;  // [rows], absolute position of the query
  void* out;                  // [rows, q_heads, head_dim], dtype or f32
  float* lse;                 // [rows, q_heads], of the estimate; or null
  uint32_t* sync;             // [(1 + lists) * 32], zero before and after
  float* scores;              // [lists, 128, group], scratch: of a sample's first points
  float* sums;                // [lists, team, group, 4], scratch on 16 bytes
  uint32_t* state;            // [lists], TAPER_SAMPLED and so on
  uint32_t* residual;         // [lists], keys that the sample stands for
  uint32_t* counts;           // [lists], sampled keys read; 0 where everything is read
  uint32_t* first;            // [lists], sampled keys of the first look; 0 where there was none
  // Quantiles, from the host: of the whole delta, of 0.9 delta for a vector, of the whole
  // one-sided, of 0.1 delta, and of six splits of delta.
  float epsilon, whole, most, upper, rest, split_vector[6], split_scalar[6];
  // Where a budget asks for more than twice the sample, it grows to this share of that, at most so many times itself, and at
  // least twice.
  float growth_share, growth_most;
  float unseen;  // what chi2 adds to a sample's variance, in units of its heaviest key's share to the power of 3/2
  double pilot_share, dense_share;
  int32_t pilot_tokens, rule, capacity, layer;  // capacity: points that a sample is of, at most
  int32_t out_f32;
  // 1: part_o, part_lse, sync, scores and sums have room for one list more; tables, seeds and positions, and the keys and values
  // of all tokens but the step's own, were there before the launch ahead began: of a row those are as many before its position as
  // there are rows, at most, and it. Where a multiprocessor is to spare, a thread block then tries on row 0's first 1,024 tokens
  // what the others will do, while the launch ahead ends, and they ask for the first tiles of their samples.
  int32_t scouts, ahead;  // ahead: set by the entry point
} TaperSampledParams;

int taper_sampled(const TaperSampledParams* p, TaperStream stream);

// --- Samples of keys (K4) and of values (S2ANTA) -------------------------------

typedef struct TaperSampleParams {
  const TaperWorkList* work;  // [rows, list_heads]; what they read is never drawn
  const uint32_t* block_ids;  // pools that the lists slice
  const uint32_t* token_ids;
  const uint64_t* seeds;      // [rows]
  const uint32_t* positions;  // [rows], absolute position of the query
  const uint32_t* wants;      // [rows, list_heads] draws; null: `want`
  const uint32_t* states;     // [rows, list_heads]: draw only where it is `state`; or null
  uint32_t* ids;              // [rows, list_heads, capacity], in drawing order
  uint32_t* counts;           // [rows, list_heads] drawn
  uint32_t layer;
  int32_t rows, list_heads, capacity, want, max_len;
  uint32_t state;
  int32_t token_shift;  // as of decode attention
} TaperSampleParams;

typedef struct TaperValuesParams {
  const void* q;                // [rows, q_heads, head_dim]
  const void* k;                // [blocks, kv_heads, 64, head_dim]
  const void* v;                // as k
  const uint32_t* block_table;  // [rows, table_stride]
  const uint32_t* lens;         // [rows], visible tokens, at least 1
  const uint64_t* seeds;        // [rows]
  const uint32_t* positions;    // [rows], absolute position of the query
  float* out;                   // [rows, q_heads, head_dim]
  float* lse;                   // [rows, q_heads] or null; exact
  uint32_t* sync;               // [(1 + lists) * 32], zero before and after
  void* weights;                // [lists, blocks of max_len, group, 64], scratch
  float* part_lse;              // [lists, runs, group], scratch, in units of log2(e); as many runs as a whole team has thread blocks
  float* parts;                 // [lists, runs, group, head_dim], scratch
  uint32_t* ids;                // [rows, q_heads, samples], the value of each draw, but of those per tile; or null
  int64_t blocks;               // of the cache
  int32_t rows, q_heads, kv_heads, head_dim, dtype, table_stride;
  int32_t max_len, samples, rule, layer;
  float scale;
  int32_t in_order;  // set by the entry point
} TaperValuesParams;

// How many tokens each KV head's query heads read between them, by lists of tokens.
typedef struct TaperDistinctParams {
  const TaperWorkList* work;  // [rows, q_heads], which read single tokens alone
  const uint32_t* token_ids;
  const float* token_ln_weight;  // beside token_ids, tokens of weight 0 are not read; or null
  uint32_t* counts;              // [rows, kv_heads]
  int32_t rows, q_heads, kv_heads;
  int32_t max_len;  // tokens of the longest row, at most 1.8 million
} TaperDistinctParams;

// Values that stand for all of a head's, drawn from its scores, as token lists with log weights that
// decode attention takes with a scale of 0. A head that has no more than `samples` scores gets all of its
// values, by their probabilities; one whose probabilities are no numbers gets weights that are none.
typedef struct TaperSpreadParams {
  const float* scores;        // [rows, q_heads, stride]
  const float* tile_max;      // [rows, q_heads, tile_stride]: of 64 scores each
  const float* tile_sum;      // as tile_max: sum of exp(score - max)
  const uint32_t* tokens;     // [rows, list_heads, stride], the token of each score; null: they follow one another
  const uint32_t* counts;     // [rows, list_heads], scores of each list; null: of all tokens
  const uint32_t* lens;       // [rows], visible tokens, at least 1
  const uint64_t* seeds;      // [rows]
  const uint32_t* positions;  // [rows], absolute position of the query
  TaperWorkList* work;        // [rows, q_heads]
  uint32_t* ids;              // [rows, q_heads, capacity]
  float* ln_weights;          // as ids
  void* room;                 // [rows, q_heads, taper_spread_room(most_tiles)] of 8 bytes, scratch; null where that is 0
  int32_t rows, q_heads, stride, tile_stride;
  int32_t capacity;     // at least `samples`, and by tile at least most_tiles
  int32_t samples, spread, layer;
  int32_t tile_tokens;  // of the tiles that get draws of their own; where none do, 64
  int32_t most_tiles;   // of the longest row
  int32_t list_heads;  // of tokens and counts, if given
} TaperSpreadParams;

// Lists key by key: the tokens of each in the order of decode attention (ranges, blocks, single tokens, the sample). One
// that names every token of its row is in the order of the tokens.
typedef struct TaperWalkParams {
  const TaperWorkList* work;  // [lists]; blocks ascending
  const uint32_t* block_ids;  // pools that the lists slice
  const uint32_t* token_ids;
  const uint32_t* states;     // [lists], of a sampled step, whose lists name no sample: of TAPER_SAMPLED a list has the first
                              // `sampled` of its draws as one, of another it is every token; or null, and those two as well
  const uint32_t* sampled;    // [lists]
  const uint32_t* draws;      // [lists, draw_stride]
  uint32_t* ids;              // [lists, capacity]
  uint32_t* counts;           // [lists], keys of each, at most `capacity`
  uint32_t* firsts;           // [lists], the first key of the sample; the count where there is none
  int32_t lists, capacity, draw_stride, token_shift;
} TaperWalkParams;

// Scores of what was walked, with the log weights of samples, and what taper_spread takes of every 64.
typedef struct TaperWeighParams {
  const float* known;           // [rows, q_heads, known_stride], scores of all tokens; null: `scores` are there
  const uint32_t* ids;          // [rows, kv_heads, stride]
  const uint32_t* counts;       // [rows, kv_heads]
  const uint32_t* firsts;       // [rows, kv_heads]
  const uint32_t* head_counts;  // [rows, q_heads], sampled keys that each head reads; null: all
  const float* head_ln_weight;  // [rows, q_heads], their log weight; null: 0, or by `residual`
  const uint32_t* residual;     // [rows, kv_heads], keys that each list's sample stands for; or null
  float* scores;                // [rows, q_heads, stride]; becomes -inf where a head does not read the key
  float* tile_max;              // [rows, q_heads, stride / 64]
  float* tile_sum;              // as tile_max
  int32_t rows, q_heads, kv_heads;
  int32_t stride;  // a multiple of 64
  int32_t known_stride;
} TaperWeighParams;

// Queries of which only some features are left, drawn by their size.
typedef struct TaperFeaturesParams {
  const float* q;             // [rows, q_heads, head_dim]
  const uint64_t* seeds;      // [rows]
  const uint32_t* positions;  // [rows], absolute position of the query
  float* out;                 // as q
  int32_t rows, q_heads;
  int32_t group;  // heads that keep one set of features; 0: each its own, as signs of one size
  int32_t head_dim, draws, layer;
} TaperFeaturesParams;

// A sample that is sure of its promise by the bounds of pages: one structure for its two launches, which other launches
// stand between (kernels/certain). The first finds what is read whatever is sampled, the second how much of a sample beside
// it is enough.
typedef struct TaperCertainParams {
  const void* q;                // [rows, q_heads, head_dim]
  const void* k;                // [blocks, kv_heads, 64, head_dim]
  const void* v;                // as k
  const uint32_t* block_table;  // [rows, table_stride]
  const TaperWorkList* lists;   // [rows, kv_heads], without samples and log weights; the second's are the first's `work`
  const uint32_t* block_ids;    // pools that the lists slice; not read by the second
  const uint32_t* token_ids;    // of pages: see token_shift
  const float* known_o;         // [rows, q_heads, head_dim], attention over `lists`
  const float* known_lse;       // [rows, q_heads]
  const uint32_t* draws;        // [rows, kv_heads, draw_stride], beside `lists`, in drawing order
  const float* page_scores;     // [rows, q_heads, score_stride], the most that keys of each page can score
  const float* page_norms;      // [blocks, kv_heads, per_block], the largest norm of each page's values
  uint32_t* bitmaps;            // [rows, kv_heads, words], scratch of the first
  uint64_t* pages;              // [rows, kv_heads, 2, page_stride], scratch of the first
  // From here to `rest`: written by the first, read by the second, which writes `work` anew.
  float* centre;        // [rows, q_heads, head_dim], guessed outputs
  float* reach;         // [rows, q_heads, 2], of unread keys the most in score and norm of the value
  TaperWorkList* work;  // [rows, kv_heads]: what is read whatever is sampled, nothing of a list that reads all; from the
                        // second all of such a list, and nothing of others
  uint32_t* ids;        // [rows, kv_heads, capacity], tokens of `work`
  uint32_t* wants;      // [rows, kv_heads], the most draws that are looked at
  uint32_t* rest;       // [rows, kv_heads], keys that they are drawn from
  // Written by the second: estimates, and for a list that reads all 0 and -inf.
  float* out;          // [rows, q_heads, head_dim]
  float* lse;          // [rows, q_heads]
  uint32_t* state;     // [rows, kv_heads], from the second TAPER_SAMPLED, TAPER_DENSE or TAPER_WHOLE
  uint32_t* residual;  // [rows, kv_heads], keys that the sample stands for; of a list that reads all those it left out
  uint32_t* counts;    // [rows, kv_heads], sampled keys; 0 where everything is read
  double epsilon, dense_share;
  double log_bounds;  // logarithm of the probability that each bound of each look may fail with, less its sign
  int32_t rows, q_heads, kv_heads, head_dim, dtype, table_stride;
  int32_t per_block;     // pages of a block
  int32_t score_stride, page_stride, words, capacity;
  int32_t draw_stride;   // of the first all that a guess is made from, at most 32
  int32_t pilot_tokens;  // of the first look; it doubles from one to the next
  int32_t looks, token_shift;
  float scale;
} TaperCertainParams;

int taper_certain_promote(const TaperCertainParams* p, TaperStream stream);
int taper_certain_look(const TaperCertainParams* p, TaperStream stream);
// Draws without replacement from what lists leave out.
int taper_sample(const TaperSampleParams* p, TaperStream stream);
// Reads all keys and some values.
int taper_values(const TaperValuesParams* p, TaperStream stream);
int taper_spread(const TaperSpreadParams* p, TaperStream stream);
// Words of 8 bytes of `room` for each list.
int64_t taper_spread_room(int64_t most_tiles);
int taper_walk(const TaperWalkParams* p, TaperStream stream);
int taper_weigh(const TaperWeighParams* p, TaperStream stream);
int taper_features(const TaperFeaturesParams* p, TaperStream stream);
int taper_distinct(const TaperDistinctParams* p, TaperStream stream);

// --- Prefill attention (K5), Delta Attention -----------------------------------

// An id in a tile's lists may be marked: with bit 31 only the tile's first 64 rows read it, with bit 30 only the others.

typedef struct TaperPrefillTile {
  uint32_t row_begin, rows;   // at most 128 rows of the launch
  uint32_t table;             // block table of the sequence
  uint32_t kv_len;            // tokens of the sequence that the cache holds
  uint32_t pos_min, pos_max;  // over the tile's rows
  uint32_t id;                // index into csr_begin
  uint32_t part;              // of the tile's keys, where `splits` asks for parts
} TaperPrefillTile;

typedef struct TaperPrefillParams {
  const void* q;                  // [rows, q_heads, head_dim]
  const void* k;                  // [blocks, kv_heads, 64, head_dim]
  const void* v;                  // as k
  const uint32_t* block_table;    // [tables, table_stride]
  const uint32_t* positions;      // [rows], absolute
  const TaperPrefillTile* tiles;  // [tile_count], longest first
  const uint32_t* heads;          // [head_count], the query heads of the launch; null: all. Others' outputs stay as they are
  const uint32_t* csr_begin;      // [csr_heads * tile_count + 1], or null
  const uint32_t* csr_counts;     // [csr_heads * tile_count]; null: a list ends where the next begins
  // Ascending logical blocks of each (head, tile), maybe marked; beyond pos_max none is read.
  const uint32_t* csr_blocks;
  const uint32_t* column_begin;   // [column_heads * tile_count] by tile id, into column_ids; or null
  const uint32_t* column_counts;
  const uint32_t* column_ids;     // tokens that the tile's rows see besides its blocks, maybe marked
  float* out;                     // [rows, q_heads, head_dim]
  float* lse;                     // [rows, q_heads], or null
  int64_t blocks;                 // of the cache
  int32_t tile_count, q_heads, kv_heads, head_dim, dtype, table_stride;
  int32_t head_count;
  int32_t csr_heads, column_heads;  // lists of heads: divisors of head_count, of whose heads they are
  // From one list head to the next in csr_begin, csr_counts and their like of columns; 0: tile_count. Tiles may then share an id.
  int32_t list_stride;
  int32_t sink, window;  // window 0: no window
  // Above 0: a tile stands in `tiles` once for every part of its keys, and the launch writes
  // partial results, `out` [rows, q_heads, splits, head_dim] and `lse` [rows, q_heads, splits].
  int32_t splits;
  // 1: tiles have at most 64 rows, and a tile is worked on for two neighbouring heads of the launch at once: of one KV head
  // and one list.
  int32_t head_pairs;
  float scale;
} TaperPrefillParams;

typedef struct TaperDeltaParams {
  float* out;                 // [tokens, q_heads, head_dim]: sparse rows in, corrected out
  const float* anchor_base;   // [anchors, q_heads, head_dim], sparse output of the anchors
  const float* anchor_dense;  // [anchors + tail rows, q_heads, head_dim]
  int64_t position;           // absolute position of row 0
  int64_t tail_begin;         // absolute position from which rows are dense
  int64_t anchor_first;       // anchors before it are not in the arrays
  int64_t anchors;            // dense tail rows start at this row of anchor_dense
  int32_t tokens, q_heads, head_dim;
  int32_t gamma;
  int32_t propagate;  // 0: only anchors and tail change (the recompute mode)
} TaperDeltaParams;

int taper_prefill(const TaperPrefillParams* p, TaperStream stream);
int taper_delta(const TaperDeltaParams* p, TaperStream stream);

// --- Scores of views (K8), selection (K3) --------------------------------------

typedef struct TaperScoreParams {
  const void* q;                // [rows, q_heads, width]
  const void* view;             // [blocks, kv_heads, per_block, width]; upper bounds if `lower`
  const void* lower;            // lower bounds, or null
  const uint32_t* block_table;  // [rows, table_stride]
  const uint32_t* lens;         // [rows], visible tokens
  float* out;                   // [rows, q_heads, stride]: scaled scores
  float* tile_max;  // [rows, q_heads, tile_stride]: of 64 entries each, or null
  float* tile_sum;  // as tile_max: sum of exp(score - max)
  int32_t rows, q_heads, kv_heads, width, dtype, table_stride;
  int32_t per_block, max_entries, stride, tile_stride;
  float scale;
  int32_t pitch;  // elements from an entry of the view to the next; 0: width
  // Where only some tokens are scored (a view of keys, no tiles, width 64 or 128): entry i of a list is
  // token ids[i], and max_entries the most of them. Or null, and counts as well.
  const uint32_t* ids;     // [rows, kv_heads, stride]
  const uint32_t* counts;  // [rows, kv_heads]
  const void* q_few;       // as q: the queries of lists of no more than `few` tokens; null: q
  int32_t few;
} TaperScoreParams;

// Scores of every token by its quantized key (TaperAppendParams). Queries are rounded to bf16.
typedef struct TaperQuantizedScoreParams {
  const void* q;                // [rows, q_heads, head_dim]
  const uint32_t* index;        // [blocks, kv_heads, 5 * head_dim]
  const uint32_t* block_table;  // [rows, table_stride]
  const uint32_t* lens;         // [rows], visible tokens
  float* out;       // [rows, q_heads, stride]: scaled scores; -inf for what a row's last 64 have beyond it
  float* tile_max;  // [rows, q_heads, tile_stride]: of 64 tokens each
  float* tile_sum;  // as tile_max: sum of exp(score - max)
  int32_t rows, q_heads, kv_heads, head_dim, dtype, table_stride;
  int32_t max_len, stride, tile_stride;  // stride: a multiple of 64
  float scale;
} TaperQuantizedScoreParams;

// The log-sum-exp of each row and head from what a score pass says of its tiles.
typedef struct TaperLseParams {
  const float* tile_max;  // as the score pass has them
  const float* tile_sum;
  const uint32_t* lens;   // [rows], visible tokens
  float* lse;             // [rows, q_heads]
  int32_t rows, q_heads, tile_stride, page;
} TaperLseParams;

// Agreement of binary codes: bits that are equal less those that differ, summed over the group.
typedef struct TaperHashScoreParams {
  const uint32_t* q;            // [rows, q_heads, words]
  const uint32_t* codes;        // [blocks, kv_heads, 64, per_head ? group * words : words]
  const uint32_t* block_table;  // [rows, table_stride]
  const uint32_t* lens;         // [rows], visible tokens
  float* out;                   // [rows, kv_heads, stride]
  int32_t rows, q_heads, kv_heads, words, per_head, table_stride;
  int32_t max_len, stride;
} TaperHashScoreParams;

typedef struct TaperSelectParams {
  const float* scores;     // [lists, stride]
  const uint32_t* begins;  // [lists], first candidate; null: 0
  const uint32_t* ends;    // [lists], one past the last candidate; null: `entries`
  const uint32_t* ks;      // [lists]; null: `k`
  uint32_t* ids;           // [lists, capacity], ascending
  uint32_t* counts;        // [lists], or null
  const TaperWorkList* given;  // [lists], what `work` begins as
  TaperWorkList* work;     // [lists], given the slice of ids as its tokens; or null
  int32_t lists, stride, capacity, entries, k;
  // By count, of shares of the attention mass: above 0 only entries that are cheaper to take than to sample around, to an eighth
  // of an octave. Of n entries whose squares sum to q that is so for the next one, of square s, while n s >= q + noise.
  float noise;
} TaperSelectParams;

typedef struct TaperGroupSelectParams {
  TaperSelectParams base;  // its scores are [lists * group, stride]
  const float* lse;        // [lists * group]: scores become exp(score - lse) first; or null
  const float* shares;     // [lists]; null: `share`
  int32_t group;           // rows of scores that one list reduces
  int32_t reduce;          // TAPER_MAX_OF_GROUP or TAPER_SUM_OF_GROUP
  int32_t mass;            // TAPER_BY_COUNT, or TAPER_BY_SCORE: the fewest that hold a share of the sum
  float share;
} TaperGroupSelectParams;

typedef struct TaperPickParams {
  const void* q;                // [rows, q_heads, width]
  const void* view;             // [blocks, kv_heads, per_block, pitch], upper bounds
  const void* lower;            // as view, lower bounds
  const uint32_t* block_table;  // [rows, table_stride]
  const uint32_t* lens;         // [rows], visible tokens
  const uint32_t* begins;       // [lists], first candidate page; null: 0
  const uint32_t* ends;         // [lists], one past the last candidate; null: all pages
  const uint32_t* ks;           // [lists]; null: `k`
  const TaperWorkList* lists;   // [lists], what `work` begins as
  uint32_t* keys;               // [lists, stride], scratch
  uint32_t* ids;                // [lists, capacity], ascending
  TaperWorkList* work;          // [lists], given the slice of ids
  uint32_t* sync;               // [(1 + lists) * 32], zero before and after
  uint64_t* masses;             // of shares: [lists, team, group, 2], zero before and after
  // Above 0: pages of so many layers are chosen. What a list is given is the same in all of them; `keys`, `ids`, `work`, `sync` and
  // `masses` are [layers, lists] where they are [lists] above, and each layer's slices count from its own ids.
  int32_t layers;
  int32_t first;            // the first of them, of `queries`
  const uint64_t* queries;  // [rows], each row's by layer [.., q_heads, width], in place of q
  const uint64_t* views;    // [layers], in place of view: of bounds beside each other, minima, then maxima
  int32_t rows, q_heads, kv_heads, width, dtype, table_stride;
  int32_t per_block, pitch;  // pitch 0: `width`
  int32_t stride;            // most candidates of a list, at most 32768; of the sum, most pages
  int32_t capacity, k;
  // TAPER_MAX_OF_GROUP of the products; TAPER_SUM_OF_GROUP or TAPER_MAX_SHARE_OF_GROUP of shares of the mass
  int32_t reduce;
  int32_t target;  // TAPER_BLOCKS, or TAPER_TOKENS: pages, cut to what lies between the list's ranges
  float scale;       // of the sum's scores
  int32_t in_order;  // set by the entry point
  // Above 0: the launch right ahead changes nothing that this one reads but the bounds of pages with any of a row's last
  // `fresh` tokens, and lets its successor begin only once all launches before it have ended, as taper_append does: pages
  // before those are scored beside it. 0: nothing is read before it has ended.
  int32_t fresh;
  int32_t team;  // thread blocks of the largest team, set by the entry point
  int32_t team_most;  // at least 1: of no more; 0: as many as suit
  float noise;   // as of TaperSelectParams, where pages have shares
} TaperPickParams;

// Tokens that cost less to read than to sample around, by their quantized keys (TaperQuantizedScoreParams): scored and
// chosen in one launch. What comes out depends on a list alone, whatever its team and the batch.
typedef struct TaperPickTokensParams {
  const void* q;                // [rows, q_heads, head_dim]
  const uint32_t* index;        // [blocks, kv_heads, 5 * head_dim]
  const uint32_t* block_table;  // [rows, table_stride]
  const uint32_t* lens;         // [rows], visible tokens
  const uint32_t* begins;       // [lists], first candidate
  const uint32_t* ends;         // [lists], one past the last; lists without candidates are not looked at
  const uint32_t* ks;           // [lists], most to choose
  const TaperWorkList* lists;   // [lists], what `work` begins as
  float* scores;                // [rows, q_heads, stride], scratch
  uint32_t* ids;                // [lists, capacity], ascending
  TaperWorkList* work;          // [lists], given the slice of ids
  uint32_t* sync;               // [(1 + lists) * 32], zero before and after
  uint64_t* sums;               // [lists, taper_team, group, 4], zero before and after
  uint32_t* bins;               // [lists, taper_team, 256], zero before and after
  int32_t rows, q_heads, kv_heads, head_dim, dtype, table_stride;
  int32_t stride;  // tokens of the longest row, a multiple of 64
  int32_t capacity;
  int32_t reduce;  // TAPER_MAX_OF_GROUP or TAPER_SUM_OF_GROUP of the heads' shares
  int32_t fresh;   // as of TaperPickParams
  float scale, noise;  // noise: as of TaperSelectParams, above 0
  int32_t team, in_order, group, room;  // set by the entry point; team: thread blocks a list; room: teams' in sums and bins
} TaperPickTokensParams;

// What candidates of each list are to hold of their own mass, for a choice of by-mass, where fixed keys hold some already:
// max(0, 1 - (1 - p) whole / rest).
typedef struct TaperSharesParams {
  const float* held;  // [rows, q_heads], log-sum-exp of the fixed keys
  const float* lse;   // [rows, q_heads], of all
  float* shares;      // [rows, kv_heads]
  int32_t rows, q_heads, kv_heads;
  float p;
} TaperSharesParams;

// Pages that were chosen, as the tokens of each that lie between the two ranges of its list.
typedef struct TaperPagesParams {
  const uint32_t* pages;   // [lists, capacity], ascending, all of them between the ranges or over their ends
  const uint32_t* counts;  // [lists]
  uint32_t* ids;           // [lists, capacity * page]
  const TaperWorkList* given;  // [lists], what `work` begins as; ranges that meet leave no tokens
  TaperWorkList* work;     // [lists], given the slice of ids
  int32_t lists, capacity, page;
} TaperPagesParams;

int taper_score(const TaperScoreParams* p, TaperStream stream);
int taper_quantized_score(const TaperQuantizedScoreParams* p, TaperStream stream);
int taper_lse(const TaperLseParams* p, TaperStream stream);
int taper_hash_score(const TaperHashScoreParams* p, TaperStream stream);
int taper_select(const TaperSelectParams* p, TaperStream stream);
int taper_select_group(const TaperGroupSelectParams* p, TaperStream stream);
// Scores and chooses pages in one launch.
int taper_pick(const TaperPickParams* p, TaperStream stream);
int taper_pick_tokens(const TaperPickTokensParams* p, TaperStream stream);
int taper_pages(const TaperPagesParams* p, TaperStream stream);
int taper_shares(const TaperSharesParams* p, TaperStream stream);

// --- Probability sums (K6) and lists for prefill -------------------------------

typedef struct TaperSlice {
  uint32_t q_row;     // its first row in q
  uint32_t rows;      // at most 64
  uint32_t position;  // absolute, of the first row
  uint32_t table;     // block table of the sequence
} TaperSlice;

typedef struct TaperReduceParams {
  const void* q;                // [tokens, q_heads, head_dim]
  const void* k;                // [blocks, kv_heads, 64, head_dim]
  const uint32_t* block_table;  // [tables, table_stride]
  const TaperSlice* slices;     // [slice_count]
  float* parts;                 // [slice_count, q_heads, splits, 64]: maximum and sum
  float* tile_diagonals;        // [slice_count, q_heads, max_blocks, 128], scratch
  float* columns;               // [slice_count, q_heads, 64 * max_blocks], by key
  float* diagonals;             // as columns, by row - key
  float* lse;                   // [slice_count, q_heads, 64]
  int32_t slice_count, q_heads, kv_heads, head_dim, dtype, table_stride;
  int32_t max_blocks;  // of the longest slice's keys
  int32_t splits;      // at least max_blocks / 32, rounded up
  float scale;
  int32_t window;  // keys that a row sees, its own the last; 0: all before it
} TaperReduceParams;

enum { TAPER_TWO_BLOCKS = 0, TAPER_DIAGONALS = 1 };  // StripesParams: a slash

typedef struct TaperStripesParams {
  // Blocks of `each` times 64 tokens, but in what `blocks` lists, which are of 64. More than 1: slashes are TAPER_TWO_BLOCKS.
  const uint32_t* columns;           // [heads, column_stride] block numbers; null: none
  const uint32_t* column_counts;     // [heads]
  const uint32_t* slashes;           // [heads, slash_stride]; null: `bitmaps` are made already
  const uint32_t* slash_counts;      // [heads]
  const TaperPrefillTile* tiles;     // [tile_count]; null: only `bitmaps` are made
  const uint32_t* list_begin;        // [heads, tile_count] by tile id: room for pos_max / 64 + 1
  uint32_t* bitmaps;                 // [heads, 2, words]
  uint32_t* blocks;                  // what list_begin points into; ascending
  uint32_t* counts;                  // [heads, tile_count]
  int32_t heads, tile_count, words;  // words: blocks of the sequence / 32, rounded up
  int32_t column_stride, slash_stride;
  // TAPER_TWO_BLOCKS: that many blocks back and one more, and block 0 is chosen. TAPER_DIAGONALS: so many tokens back,
  // in every block that this touches.
  int32_t slash;
  // 1: rows 64 and on of a tile are the next query block's, and blocks that only one of the two reads are marked so; `each` is 1.
  int32_t halves, each;
} TaperStripesParams;

// How many keys each run of rows, within one block of so many tokens, reads before that block: by bitmaps, and single tokens in
// no block that it reads.
typedef struct TaperBeforeParams {
  const uint32_t* bitmaps;       // [heads, 2, words] as taper_stripes makes them
  const uint32_t* tokens;        // [heads, token_stride]; or null
  const uint32_t* token_counts;  // [heads]
  const uint32_t* own;           // [runs], the block of each
  uint32_t* before;              // [heads, runs]
  int32_t heads, runs, words, token_stride, block_tokens;
} TaperBeforeParams;

// Single columns of each head, less those that a tile's blocks hold already or that lie beyond
// its rows: vertical lines beside slashes, each key once. Marked where some rows read it within a block.
typedef struct TaperColumnsParams {
  const uint32_t* columns;        // [heads, column_stride] tokens, ascending
  const uint32_t* counts;         // [heads]
  const TaperPrefillTile* tiles;  // [tile_count]
  const uint32_t* list_begin;     // [list_heads * tile_count] by tile id, into blocks
  const uint32_t* list_counts;    // [list_heads * tile_count]
  const uint32_t* blocks;         // ascending in each list
  const uint32_t* column_begin;   // [heads * tile_count] by tile id: room for counts[head]
  uint32_t* column_ids;           // what column_begin points into; ascending
  uint32_t* column_counts;        // [heads * tile_count]
  int32_t heads, list_heads, tile_count, column_stride;
} TaperColumnsParams;

// Means of runs of rows.
typedef struct TaperMeansParams {
  const void* x;                // [rows, heads, head_dim], or the cache [blocks, heads, 64, head_dim] beside a table
  const uint32_t* block_table;  // [blocks of the sequence]: rows are its tokens, a run's all of one block; or null
  const uint32_t* runs;         // [run_count, 2]: first row, and how many, at least 1
  float* out;                   // [heads, run_count, head_dim]
  int32_t run_count, heads, head_dim, dtype;
} TaperMeansParams;

// One more block at the end of each list.
typedef struct TaperOwnParams {
  uint32_t* ids;        // [lists, capacity]
  uint32_t* counts;     // [lists], below capacity; one more after
  const uint32_t* own;  // [run_count]: list l gets that of run l % run_count
  int32_t lists, run_count, capacity;
} TaperOwnParams;

int taper_means(const TaperMeansParams* p, TaperStream stream);
int taper_own(const TaperOwnParams* p, TaperStream stream);
int taper_reduce(const TaperReduceParams* p, TaperStream stream);
int taper_stripes(const TaperStripesParams* p, TaperStream stream);
int taper_before(const TaperBeforeParams* p, TaperStream stream);
int taper_drop_columns(const TaperColumnsParams* p, TaperStream stream);

// --- Search by halves for prefill (HiP Attention) ------------------------------

// A run of neighbouring rows that share a choice of keys.
typedef struct TaperSearchRun {
  uint32_t first_mean, means;  // its slice of `means`, at least one
  uint32_t first_tile;         // tiles of the runs before it: means * group / 8, rounded up
  uint32_t sinks;              // blocks at the start that are read
  uint32_t far, near;          // tokens that are searched: whole blocks, from `sinks` on
  uint32_t last;               // the block of its last row; blocks from `near` on are read
  uint32_t reserved;
  uint32_t keep[12];           // tokens that each stage keeps
} TaperSearchRun;

typedef struct TaperSearchParams {
  const void* q;                // [tokens, q_heads, head_dim]
  const void* k;                // [blocks, kv_heads, 64, head_dim]
  const uint32_t* block_table;  // of the sequence
  const uint32_t* means;        // [means, 2]: first row of q and how many rows a mean query is of
  const TaperSearchRun* runs;   // [run_count], those that search most last
  void* lines;                  // [kv_heads, tiles, 8, head_dim], scratch: mean queries
  uint32_t* scratch;            // [slots, chunk_room + 2 * kept_room]
  const uint32_t* block_begin;  // [kv_heads, run_count], into `blocks`
  uint32_t* blocks;             // those that are read whole, ascending
  const uint32_t* column_begin; // [kv_heads, run_count], into `columns`
  uint32_t* columns;            // tokens that are read besides, ascending
  uint32_t* block_counts;       // [kv_heads, run_count]
  uint32_t* column_counts;      // as block_counts
  uint32_t* looked;             // as block_counts: keys that were looked at, some more than once
  int32_t run_count, q_heads, kv_heads, head_dim, dtype;
  int32_t tiles;                // of all runs
  int32_t slots;                // thread blocks at most
  int32_t chunk_room;           // most chunks of a stage
  int32_t kept_room;            // most chunks that a stage keeps
  int32_t stages;               // at most 12
  uint32_t chunk[12];           // of each stage: powers of two, 2 to 4096, falling
} TaperSearchParams;

int taper_search(const TaperSearchParams* p, TaperStream stream);

// --- Appended metadata (K7) ----------------------------------------------------

typedef struct TaperAppendSpan {
  uint32_t table, begin, end, reserved;  // tokens begin .. end - 1 are new; end are visible
} TaperAppendSpan;

typedef struct TaperAppendParams {
  const void* k;                 // [blocks, kv_heads, 64, head_dim]
  const uint32_t* block_table;   // [tables, table_stride]
  const TaperAppendSpan* spans;  // [span_count]
  const uint32_t* channels;      // [kv_heads, width], which elements are labels
  void* labels;                 // [blocks, kv_heads, 64, width], or null
  void* pages;                  // [blocks, kv_heads, 64 / page, 2 * head_dim]: minima, then maxima; or null
  float* norms;                 // [blocks, kv_heads, 64 / page], the largest norm, rounded up; or null
  // [blocks, kv_heads, 5 * head_dim], or null: keys of 2 bits a channel, channel by channel within a block of 64 tokens.
  // Word w * 64 + t, w below head_dim / 16, holds channels 16 w to 16 w + 15 of token t: 16 w + 4 i + m from bit
  // 8 * {0, 2, 1, 3}[m] + 2 i on. Behind them `base` and `step` [head_dim], bf16: a key is about base + code * step. Step is a
  // quarter of the range of the visible keys, base half a step above the least, and a code the number of steps in it.
  uint32_t* quantized;
  int32_t span_count, kv_heads, head_dim, dtype, table_stride;
  int32_t max_blocks;  // that one span touches
  int32_t width, page;
} TaperAppendParams;

// Signs of activations as bits: bit i of word w is set where element 32 w + i is not negative.
typedef struct TaperCodeParams {
  const void* x;                // [tokens, heads, 32 * words]
  const uint32_t* positions;    // [tokens], or null: codes are [tokens, heads, words]
  const uint32_t* token_table;  // [tokens]
  const uint32_t* block_table;  // [tables, table_stride]
  uint32_t* codes;              // [blocks, kv_heads, 64, heads / kv_heads * words]
  int32_t tokens, heads, kv_heads, words, dtype, table_stride;
} TaperCodeParams;

int taper_append(const TaperAppendParams* p, TaperStream stream);
int taper_codes(const TaperCodeParams* p, TaperStream stream);

// --- Rows before they are compared with something learned ----------------------

// Rows as f32, the rotary embedding taken off.
typedef struct TaperRowsParams {
  const void* x;          // [tokens, heads, width], or with `slots` the cache [blocks, heads, 64, width]
  const uint32_t* slots;  // [tokens], block * 64 + row, UINT32_MAX for none, which is zeros; or null
  const float* cos;       // [tokens, width / 2], or null: as they are
  const float* sin;       // as cos
  float* out;             // [tokens, heads, width]
  int32_t tokens, heads, width, dtype;
  int32_t x_f32;  // 1: x is f32
} TaperRowsParams;

enum { TAPER_LINEAR = 0, TAPER_RELU = 1, TAPER_SILU = 2 };

// One layer of a perceptron for each head, or products with a head's centroids, times `scale`: any widths. A head's map
// is the heads / maps-th of its number, what it reads of x the heads / x_heads-th.
typedef struct TaperProjectParams {
  const void* x;        // [rows, x_heads, inputs]
  const float* cos;     // [rows, inputs / 2] of the turn that is taken off x first, or null
  const float* sin;     // as cos
  const void* weight;   // [maps, outputs, inputs], f32, or bf16 of inputs in eights
  const float* bias;    // [maps, outputs], or null
  void* out;            // [rows, heads, outputs], f32 or bf16
  int32_t rows, heads, x_heads, maps, inputs, outputs;
  int32_t activation;  // TAPER_LINEAR and so on
  int32_t bf16;        // 1: out is bf16
  float scale;
  int32_t weight_bf16;  // 1: weights are bf16
  int32_t dtype, x_f32;  // of x
  // 1: the launch right ahead changes nothing that this one reads, and lets its successor begin only once all launches before it
  // have ended, as taper_saap_key_clusters does: it is not waited for but at the end. 0: nothing is read before it has ended.
  int32_t fresh;
  int32_t staged;  // rows in shared memory, set by the entry point
} TaperProjectParams;

// Some channels of each query, those of its KV head.
typedef struct TaperChannelsParams {
  const void* q;             // [rows, q_heads, head_dim], 16 bits an element
  const uint32_t* channels;  // [kv_heads, width]
  void* out;                 // [rows, q_heads, width]
  int32_t rows, q_heads, kv_heads, head_dim, width;
} TaperChannelsParams;

int taper_rows(const TaperRowsParams* p, TaperStream stream);
int taper_project(const TaperProjectParams* p, TaperStream stream);
int taper_channels(const TaperChannelsParams* p, TaperStream stream);

// --- SAAP ----------------------------------------------------------------------

// The cluster of each new key of a prompt's blocks: the first of the largest of its products with centroids.
typedef struct TaperNearestParams {
  const float* products;        // [kv_heads, tokens, clusters]
  const uint32_t* positions;    // [tokens]
  const uint32_t* token_table;  // [tokens]
  const uint32_t* block_table;  // [tables, table_stride]
  uint16_t* ids;                // [blocks, kv_heads, 64]
  int32_t tokens, kv_heads, clusters, table_stride;
} TaperNearestParams;

// Single keys of the cache, by slots: `cos` and `sin` of the turn that is taken off each first, or null. In f32.
typedef struct TaperKeyClusterParams {
  const void* k;           // [blocks, kv_heads, 64, head_dim], bf16 or f16
  const float* centroids;  // [kv_heads, clusters, head_dim]
  const uint32_t* slots;   // [tokens], block * 64 + row
  const float* cos;        // [tokens, head_dim / 2]
  const float* sin;
  uint16_t* ids;           // [blocks, kv_heads, 64]
  int32_t tokens, kv_heads, head_dim, clusters, dtype;
} TaperKeyClusterParams;

// Whole clusters by the group's probabilities, the likeliest first and of equals the first, as many as a limit says:
// tokens between the two ranges of each list, ascending. Limits and lists are read before launches ahead have ended, so these
// must not be what writes them.
typedef struct TaperProbeParams {
  const float* logits;          // [rows, q_heads, clusters]
  const uint16_t* ids;          // [blocks, kv_heads, 64]
  const uint32_t* block_table;  // [rows, table_stride]
  const uint32_t* limits;       // [rows, kv_heads], tokens taken at most, or at least
  const TaperWorkList* lists;   // [rows, kv_heads], what `work` begins as; ranges that meet leave no tokens
  TaperWorkList* work;          // [rows, kv_heads], given the slice of token_ids
  uint32_t* token_ids;          // [rows, kv_heads, capacity]
  int32_t rows, q_heads, kv_heads, clusters, table_stride;
  int32_t most;      // clusters taken at most
  int32_t at_least;  // 1: the fewest that hold `limits` tokens, 0: as many as hold no more
  int32_t capacity;  // at least the tokens of any row
} TaperProbeParams;

int taper_saap_nearest(const TaperNearestParams* p, TaperStream stream);
int taper_saap_key_clusters(const TaperKeyClusterParams* p, TaperStream stream);
int taper_saap_probe(const TaperProbeParams* p, TaperStream stream);

// --- Between matrix products ---------------------------------------------------

// Keys and values of a step's tokens into the cache, keys and queries rotated.
typedef struct TaperRopeParams {
  const void* qkv;        // [tokens, q_heads + 2 kv_heads, head_dim]: q heads, k heads, v heads
  const float* angles;    // [tokens, head_dim]: cosines of the halves' pairs, then sines
  const uint32_t* slots;  // [tokens], block * 64 + row
  void* q;                // [tokens, q_heads, head_dim]
  void* k;                // cache, [blocks, kv_heads, 64, head_dim]
  void* v;
  // [tokens], where each token's rotated queries go as well, by layer [.., q_heads, head_dim], or 0; may be null
  const uint64_t* kept;
  int32_t tokens, q_heads, kv_heads, head_dim;
  int32_t dtype, qkv_dtype;  // of all else, and of qkv
  int32_t layer;             // of `kept`
} TaperRopeParams;

// Cosines and sines of positions times frequencies, both times factor. The product is rounded to f32, as
// on the host.
typedef struct TaperAnglesParams {
  const uint32_t* positions;  // [rows]; null: they are in `few`, at most TAPER_FEW_ROWS
  const float* frequencies;   // [half]
  float* angles;              // [rows, 2 * half]: cosines, then sines
  int32_t rows, half;
  float factor;
  uint32_t few[32];
} TaperAnglesParams;

enum { TAPER_FEW_ROWS = 32 };

// Words that go from one place of the device's memory to another, in fours.
typedef struct TaperWordCopy {
  const uint32_t* from;
  uint32_t* to;
  int64_t count;
} TaperWordCopy;

// Words that come with the launch: `count` of them from the `first` on.
typedef struct TaperWordRun {
  uint32_t* to;
  int32_t first, count;
} TaperWordRun;

enum { TAPER_WORD_COPIES = 4, TAPER_WORD_RUNS = 16, TAPER_WORDS = 768 };

// What a step finds in its place before its launches read it. No two of them lie on one another.
typedef struct TaperWordsParams {
  TaperWordCopy copies[4];
  TaperWordRun runs[16];
  uint32_t words[768];
  int32_t copy_count, run_count;
} TaperWordsParams;

// Rows into one pool of the cache as they are, at slots: block * 64 + row.
typedef struct TaperWriteParams {
  const void* rows;       // [tokens, kv_heads, head_dim], f32 or the pool's dtype
  const uint32_t* slots;  // [tokens]
  void* pool;             // [blocks, kv_heads, 64, head_dim]
  int32_t tokens, kv_heads, head_dim, dtype, rows_f32;
} TaperWriteParams;

typedef struct TaperNormParams {
  const float* x;       // [rows, width]
  const float* weight;  // [width]; null: x is only rounded
  void* out;            // [rows, width], of dtype
  int32_t rows, width, dtype;
  float epsilon;
} TaperNormParams;

typedef struct TaperSiluParams {
  const void* gate_up;  // [rows, 2 * width]: gate, then up
  void* out;            // [rows, width]: silu(gate) * up
  int64_t rows;
  int32_t width, dtype;
} TaperSiluParams;

// Where a product goes: to a tensor of the weight's dtype or in f32, added to one in f32, or, of a
// gate's outputs and as many others behind them, silu(gate) * other in the weight's dtype.
enum { TAPER_PRODUCT_SAME, TAPER_PRODUCT_F32, TAPER_PRODUCT_ADD, TAPER_PRODUCT_GATED };

// A few rows times a weight matrix.
typedef struct TaperProductParams {
  const void* x;       // [rows, inputs], f32 or the weight's dtype
  const void* weight;  // [outputs, inputs]
  const float* norm;   // [inputs]: x is normalised by its root mean square and multiplied by this; or null
  void* out;           // [rows, outputs], or half as many where gated
  int32_t rows, inputs, outputs, dtype, x_f32, to;
  float epsilon;
} TaperProductParams;

// At most 4 rows; inputs a multiple of 8, outputs of 2.
int taper_product(const TaperProductParams* p, TaperStream stream);

enum { TAPER_CHAIN_MAX = 4, TAPER_CHAIN_INPUTS = 16384 };

// Products of one row in one launch, each of which begins when those before it have ended: of one dtype, of at most
// TAPER_CHAIN_INPUTS inputs each. Thread blocks wait for all others, and there is one for each multiprocessor: two such
// launches must not run beside each other.
typedef struct TaperChainParams {
  TaperProductParams products[4];
  uint32_t* sync;                  // [32]: 0 before the launch and after it
  int32_t count;                   // products, at most TAPER_CHAIN_MAX
  int32_t inputs_most;             // set by the entry point
} TaperChainParams;

int taper_chain(const TaperChainParams* p, TaperStream stream);

// Rotation, and keys and values to the cache.
int taper_rope(const TaperRopeParams* p, TaperStream stream);
int taper_angles(const TaperAnglesParams* p, TaperStream stream);
int taper_words(const TaperWordsParams* p, TaperStream stream);
int taper_write(const TaperWriteParams* p, TaperStream stream);
int taper_norm(const TaperNormParams* p, TaperStream stream);
int taper_silu(const TaperSiluParams* p, TaperStream stream);

// How a row's token is chosen: weights are exp((logit - largest) / temperature).
typedef struct TaperTokenRow {
  float temperature;  // 0: the likeliest token, the first of equals
  float top_p;        // the fewest heaviest that hold this share of the weight; 1: all
  float min_p;        // those of at least this weight; the likeliest has 1
  int32_t top_k;      // so many of the heaviest; 0: all. min_p and top_k come before top_p
  double uniform;     // in [0, 1): where the token stands in the running weight of those that are kept
} TaperTokenRow;

// Tokens from logits.
typedef struct TaperTokenParams {
  const float* logits;       // [rows, vocab]
  const TaperTokenRow* how;  // [rows], or null: the likeliest
  uint32_t* tokens;          // [rows]; 2^32 - 1 where a logit is NaN or +infinity, or none is finite
  int32_t rows, vocab;
} TaperTokenParams;

// vocab up to 262,144.
int taper_tokens(const TaperTokenParams* p, TaperStream stream);

#ifdef __cplusplus
}
#endif

#endif  // TAPER_GPU_H
