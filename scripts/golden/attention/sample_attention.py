#!/usr/bin/env python3
"""SampleAttention, for prefill (see common.py): the columns and diagonals in which sampled rows' probability lies.

Chunk i of the S rows ends before floor((i + 1) S / chunks). The probabilities of its last `block` rows are summed, over
these rows and a group's heads, by blocks of keys (columns) and by floor((row - key) / block) (slashes); of each the
fewest that reach the share alpha, the crossing one included, are kept. Row r of the chunk, in query block qb, reads the
kept columns, for each kept slash b the blocks qb - b and qb - b - 1, its own block and block 0, causally.

Besides: `columns` and `slashes` [chunks, kv_heads, blocks], u8, and `cra` [chunks * slice rows, q_heads], the
probability that each sampled row keeps.
"""

from common import Array, attend, clear, first_clear, heads, np, prefill, scores, softmax, widen

BLOCK = 64


def find(mass: Array, alpha: float, crossing: bool = True) -> Array:
    """[blocks]: the heaviest whose share reaches alpha."""
    order = np.argsort(-mass, kind="stable")
    reached = np.cumsum(mass[order]) / mass.sum()
    needed = int(np.argmax(reached >= alpha)) + 1
    clear(reached[needed - 1], alpha)
    clear(mass[order[needed - 1]], mass[order[needed]])
    if needed > 1:
        clear(reached[needed - 2], alpha)
    kept = np.zeros(len(mass), bool)
    kept[order[: needed if crossing else needed - 1]] = True
    return kept


def make(name: str, settings: dict, n: int, seed: int, wide: bool = False) -> None:
    kv_heads = 1 if wide else 2
    drawn = heads(seed, n=n, kv_heads=kv_heads, group=2, d=8 if wide else 16)
    q, k, v = widen(*drawn) if wide else drawn
    blocks = -(-n // BLOCK)
    p = softmax(scores(q, k))
    at = np.arange(n)

    def sample(chunks: int, block_diagonals=False, crossing=True, first=False) -> tuple[list[Array], Array, Array]:
        """Each chunk's rows that are sampled; [chunks, kv_heads, blocks] of columns and slashes."""
        ends = [i * n // chunks for i in range(chunks + 1)]
        rows = [at[max(start, end - BLOCK) : end] for start, end in zip(ends, ends[1:])]
        columns, slashes = np.zeros((2, chunks, kv_heads, blocks), bool)
        for i in range(chunks):
            bucket = (rows[i][:, None] - at) // BLOCK
            if block_diagonals:
                bucket = rows[i][:, None] // BLOCK - at // BLOCK
            for h in range(kv_heads):
                a = p[rows[i], 2 * h : 2 * h + (1 if first else 2)].sum(axis=1)
                by_column = np.bincount(at // BLOCK, a.sum(axis=0), blocks)
                by_slash = np.bincount(np.maximum(bucket, 0).ravel(), a.ravel(), blocks)
                columns[i, h] = find(by_column, settings["alpha_c"], crossing)
                slashes[i, h] = find(by_slash, settings["alpha_s"], crossing)
        return rows, columns, slashes

    def mask(columns: Array, slashes: Array, below=True, first=True, by_block=False) -> Array:
        """[rows, kv_heads, n]"""
        chunks = len(columns)
        chunk_of = np.searchsorted([(i + 1) * n // chunks for i in range(chunks)], at, side="right")
        read = np.zeros((n, kv_heads, n), bool)
        for r in range(n):
            qb = r // BLOCK
            chunk = chunk_of[qb * BLOCK] if by_block else chunk_of[r]
            for h in range(kv_heads):
                taken = columns[chunk, h].copy()
                for b in np.flatnonzero(slashes[chunk, h]):
                    taken[[kb for kb in ([qb - b, qb - b - 1] if below else [qb - b]) if kb >= 0]] = True
                taken[0] |= first
                taken[qb] = True
                read[r, h] = np.repeat(taken, BLOCK)[:n] & (at <= r)
        return read

    chunks = settings["chunks"]
    rows, columns, slashes = sample(chunks)
    read = mask(columns, slashes)
    wrong = {
        "one block a slash": mask(columns, slashes, below=False),
        "without block 0": mask(columns, slashes, first=False),
        "columns alone": mask(columns, slashes & False),
        "slashes alone": mask(columns & False, slashes),
        "diagonals of blocks": mask(*sample(chunks, block_diagonals=True)[1:]),
        "the crossing block left out": mask(*sample(chunks, crossing=False)[1:]),
        "the first head": mask(*sample(chunks, first=True)[1:]),
        "other chunks": mask(*sample(3 - chunks)[1:]),
    }
    if kv_heads > 1:
        wrong["the other KV head"] = mask(columns[:, ::-1], slashes[:, ::-1])
    if chunks > 1:
        wrong["the block's chunk"] = mask(columns, slashes, by_block=True)
        wrong["one set"] = mask(columns.any(axis=0, keepdims=True), slashes.any(axis=0, keepdims=True))
    sampled = np.concatenate(rows)
    cra = np.where(np.repeat(read[sampled], 2, axis=1), p[sampled], 0).sum(axis=2)
    out, misread = attend(q, k, v, read), {key: attend(q, k, v, other) for key, other in wrong.items()}
    narrow = drawn if wide else None
    prefill(name, settings, (q, k, v), out, misread, narrow, cra=cra, columns=columns, slashes=slashes)


def main() -> None:
    settings = {"method": "sample_attention", "alpha_c": 0.6, "alpha_s": 0.6, "chunks": 2, "block": 64, "min_tokens": 0}
    first_clear(lambda seed: make("sample_attention", settings, 1013, seed))
    first_clear(lambda seed: make("sample_attention-one-chunk", settings | {"chunks": 1}, 1013, seed))
    settings |= {"alpha_c": 0.5, "alpha_s": 0.5}
    first_clear(lambda seed: make("sample_attention-wide", settings, 577, seed, wide=True))


if __name__ == "__main__":
    main()
