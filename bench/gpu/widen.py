"""A checkpoint of a larger shape that computes what a smaller Llama computes: what a large model's steps cost, with a trained model's answers.

    widen.py MODEL OUT [--layers 32 --hidden 4096 --intermediate 14336 --heads 32 --kv-heads 8 --head-dim 128 --vocab 128256]
        [--yarn FACTOR]

The defaults are llama-3.1-8b's. MODEL's weights stand in a corner of the larger ones. The rest is noise wherever what it is multiplied
with is zero, and zero where it would reach a residual, a key or a value; more layers than MODEL has add nothing. Rotation: frequency i of a head of
MODEL is frequency 2 i of one twice as large, so head_dim is MODEL's times a power of two. Attention's scale and the norms' mean over more elements are folded into weights, whose
rounding to bfloat16 is the only difference. --yarn lets positions reach FACTOR times as far.
"""
import argparse
import json
import os
import shutil

import numpy as np

SHARD = 4 << 30
NOISE = 1 << 22


def to_float(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x):
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def read(folder):
    """Every tensor of one bfloat16 safetensors file."""
    path = os.path.join(folder, "model.safetensors")
    with open(path, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    data = np.memmap(path, np.uint16, "r", 8 + size)
    out = {}
    for name, info in header.items():
        if name != "__metadata__":
            if info["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {info['dtype']}; BF16 is what this reads")
            begin, end = info["data_offsets"]
            out[name] = data[begin // 2:end // 2].reshape(info["shape"])
    return out


class Writer:
    """Shards of safetensors whose tensors are made one at a time."""

    def __init__(self, folder):
        self.folder, self.pending, self.bytes, self.files, self.index = folder, [], 0, 0, {}

    def add(self, name, shape, make):
        size = 2 * int(np.prod(shape))
        if self.bytes + size > SHARD:
            self.flush()
        self.pending.append((name, list(shape), make))
        self.bytes += size

    def flush(self):
        if not self.pending:
            return
        self.files += 1
        name, header, at = f"model-{self.files:05d}.safetensors", {}, 0
        for tensor, shape, _ in self.pending:
            size = 2 * int(np.prod(shape))
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            self.index[tensor] = name
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(os.path.join(self.folder, name), "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for tensor, shape, make in self.pending:
                x = make()
                assert x.shape == tuple(shape) and x.dtype == np.uint16, (tensor, x.shape, shape)
                x.tofile(f)
        self.pending, self.bytes = [], 0

    def close(self):
        self.flush()
        with open(os.path.join(self.folder, "model.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {}, "weight_map": self.index}, f)


class Wide:
    """The larger tensors. Of each: where MODEL's rows and columns go, and where noise may not be."""

    def __init__(self, small, big, tensors):
        self.small, self.big, self.tensors = small, big, tensors
        self.noise = to_bf16(np.random.default_rng(0).standard_normal(NOISE, np.float32) * 0.02)
        group = small["num_attention_heads"] // small["num_key_value_heads"]
        more = big["num_attention_heads"] // big["num_key_value_heads"]
        times = big["head_dim"] // small["head_dim"]
        assert more >= group and big["num_key_value_heads"] >= small["num_key_value_heads"]
        half = small["head_dim"] // 2
        dims = np.concatenate([np.arange(half) * times, big["head_dim"] // 2 + np.arange(half) * times])
        kv_heads = np.arange(small["num_key_value_heads"])
        heads = (kv_heads[:, None] * more + np.arange(group)).reshape(-1)
        # Heads that MODEL does not have read the values of those beside them.
        beside = np.arange(small["num_key_value_heads"] * more)
        self.q, self.kv, self.read = ((of[:, None] * big["head_dim"] + dims).reshape(-1) for of in (heads, kv_heads, beside))
        self.hidden, self.inner = np.arange(small["hidden_size"]), np.arange(small["intermediate_size"])
        self.scale = np.sqrt(big["head_dim"] / small["head_dim"])
        # x / sqrt(mean x²) over more elements, of which the rest are zero.
        self.norm = np.sqrt(small["hidden_size"] / big["hidden_size"])

    def matrix(self, name, shape, rows, columns, read=None, silent=None, scale=1.0):
        """MODEL's matrix at its rows and columns; noise but in the columns that are `read`, its own if not said, and `silent` rows."""
        x = self.tensors.get(name)

        def make():
            out = np.resize(self.noise, shape)
            out[:, columns if read is None else read] = 0
            if silent is not None:
                out[silent] = 0
            if x is not None:
                out[np.ix_(rows, columns)] = x if scale == 1.0 else to_bf16(to_float(x) * np.float32(scale))
            return out
        return shape, make

    def vector(self, name):
        shape = (self.big["hidden_size"],)

        def make():
            out = np.zeros(shape, np.uint16)
            if name in self.tensors:
                out[self.hidden] = to_bf16(to_float(self.tensors[name]) * np.float32(self.norm))
            return out
        return shape, make

    def layer(self, i):
        big, p = self.big, f"model.layers.{i}."
        wide, inner = big["hidden_size"], big["intermediate_size"]
        q, kv = (big[n] * big["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
        # Inputs beyond MODEL's are zero, so columns there may be noise; in the columns of its own, what is not its own must be zero.
        yield p + "self_attn.q_proj.weight", *self.matrix(p + "self_attn.q_proj.weight", (q, wide), self.q, self.hidden, scale=self.scale)
        for part in "kv":
            name = f"{p}self_attn.{part}_proj.weight"
            yield name, *self.matrix(name, (kv, wide), self.kv, self.hidden)
        yield p + "self_attn.o_proj.weight", *self.matrix(p + "self_attn.o_proj.weight", (wide, q), self.hidden, self.q, read=self.read)
        for part in ("gate", "up"):
            name = f"{p}mlp.{part}_proj.weight"
            yield name, *self.matrix(name, (inner, wide), self.inner, self.hidden)
        yield p + "mlp.down_proj.weight", *self.matrix(p + "mlp.down_proj.weight", (wide, inner), self.hidden, self.inner)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield p + name, *self.vector(p + name)

    def all(self):
        big, words = self.big, np.arange(self.small["vocab_size"])
        table = "model.embed_tokens.weight"
        shape = (big["vocab_size"], big["hidden_size"])
        # Embeddings have nothing beyond MODEL's elements; the head may, and words that MODEL does not have score zero.
        yield table, *self.matrix(table, shape, words, self.hidden, silent=words)
        for i in range(big["num_hidden_layers"]):
            yield from self.layer(i)
        yield "model.norm.weight", *self.vector("model.norm.weight")
        head = self.matrix("lm_head.weight" if "lm_head.weight" in self.tensors else table, shape, words, self.hidden)
        yield "lm_head.weight", *head


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("out")
    sizes = {"layers": ("num_hidden_layers", 32), "hidden": ("hidden_size", 4096), "intermediate": ("intermediate_size", 14336),
             "heads": ("num_attention_heads", 32), "kv_heads": ("num_key_value_heads", 8), "head_dim": ("head_dim", 128),
             "vocab": ("vocab_size", 128256)}
    for name, (_, default) in sizes.items():
        options.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    options.add_argument("--yarn", type=float)
    options = options.parse_args()
    with open(os.path.join(options.model, "config.json")) as f:
        small = json.load(f)
    big = small | {key: getattr(options, name) for name, (key, _) in sizes.items()}
    big |= {"tie_word_embeddings": False, "rms_norm_eps": small["rms_norm_eps"] * small["hidden_size"] / big["hidden_size"]}
    if options.yarn:
        context = small["max_position_embeddings"]
        big |= {"max_position_embeddings": int(context * options.yarn),
                "rope_scaling": {"rope_type": "yarn", "factor": options.yarn, "original_max_position_embeddings": context}}
    os.makedirs(options.out, exist_ok=True)
    writer = Writer(options.out)
    for name, shape, make in Wide(small, big, read(options.model)).all():
        writer.add(name, shape, make)
    writer.close()
    with open(os.path.join(options.out, "config.json"), "w") as f:
        json.dump(big, f, indent=1)
    for name in os.listdir(options.model):
        if name != "config.json" and name.endswith((".json", ".jinja")) and "safetensors" not in name:
            shutil.copy(os.path.join(options.model, name), options.out)


main()
