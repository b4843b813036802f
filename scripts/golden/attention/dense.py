#!/usr/bin/env python3
"""Dense attention, for prefill and for decode (see common.py): softmax over every key that a row sees."""

from common import WRONG, Array, attend, dense, difference, heads, np, write


def main() -> None:
    for phase, shape in [("prefill", {"n": 201}), ("decode", {"n": 333, "rows": 4})]:
        q, k, v = heads(0, kv_heads=2, group=2, d=16, **shape)
        out = dense(q, k, v)
        rows, n = len(q), len(k)
        at, position = np.arange(n), np.arange(n - rows, n)[:, None]

        def without(left_out: Array) -> Array:
            """A row must read something: the first reads its own key whatever is left out."""
            return attend(q, k, v, (~left_out | (at == position) & (position == 0))[:, None])

        wrong = {
            "without the row's own key": without(at == position),
            "without the first key": without(np.broadcast_to(at == 0, (rows, n))),
            "the other KV head": attend(q, k[:, ::-1], v[:, ::-1], np.ones((rows, 1, n), bool)),
            "unscaled": dense(q * 4, k, v),
        }
        for name, other in wrong.items():
            assert difference(other, out) > WRONG, name
        write(f"dense-{phase}", {phase: {"method": "dense"}}, {"q": q, "k": k, "v": v, "out": out})


if __name__ == "__main__":
    main()
