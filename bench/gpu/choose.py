"""Tokens from logits: the likeliest, or drawn among those that top_k, top_p and min_p keep.

check(report, small) compares with PyTorch; bench(put, time) measures.
"""
import torch

from taper_gpu import TokenParams, TokenRow, call, words

DEV = "cuda"


class Choose:
    """how: fields of TokenRow for each row, or None."""

    def __init__(self, logits, how=None):
        rows, vocab = logits.shape
        self.tokens = torch.full((rows,), -2, dtype=torch.int32, device=DEV)
        if how:
            how = torch.tensor([words(TokenRow(**row)) for row in how], dtype=torch.int32, device=DEV)
        self.p = TokenParams(logits=logits, how=how, tokens=self.tokens, rows=rows, vocab=vocab)

    def __call__(self):
        call("taper_tokens", self.p)


def drawn(uniforms, top_p=1.0, top_k=0):
    return [{"temperature": 0.8, "top_p": top_p, "top_k": top_k, "uniform": u} for u in uniforms]


def check(report, small):
    for vocab in (1000, 49_152, 128_256, 200_000):
        x = torch.randn(16, vocab, device=DEV) * 4
        f = Choose(x)
        f()
        report(f"likeliest of {vocab}", float((f.tokens.long() != x.argmax(1)).any()), 0.5)
        u = torch.rand(16, dtype=torch.float64).tolist()
        f = Choose(x, drawn(u, top_p=0.9))
        f()
        w, order = (x.double() / 0.8).softmax(1).sort(1, descending=True)
        kept = w * (w.cumsum(1) - w < 0.9)
        w = torch.zeros_like(w).scatter_(1, order, kept / kept.sum(1, keepdim=True)).cumsum(1)
        want = (w > torch.tensor(u, device=DEV)[:, None]).int().argmax(1)
        report(f"drawn of {vocab}", float((f.tokens.long() != want).sum()), 0.5)


def bench(put, time):
    for rows, vocab in ((1, 128_256), (32, 128_256), (32, 49_152)):
        x = torch.randn(rows, vocab, device=DEV) * 4
        name = f"{rows} rows of {vocab} logits"
        u = [(i + 0.5) / rows for i in range(rows)]
        put(f"likeliest of {name} us", time(Choose(x)))
        put(f"temperature of {name} us", time(Choose(x, drawn(u))))
        put(f"top_p of {name} us", time(Choose(x, drawn(u, top_p=0.9))))
        put(f"top_k and top_p of {name} us", time(Choose(x, drawn(u, top_p=0.9, top_k=40))))
        put(f"argmax by torch of {name} us", time(lambda: x.argmax(1)))
        put(f"softmax and sort by torch of {name} us", time(lambda: x.softmax(1).sort(1, descending=True)))
