"""Answers of plain PyTorch to the prompts of `taper eval needle`, and how they score beside Taper's own.

    taper eval needle --model MODEL ... --prompts asked.jsonl
    taper eval needle --model MODEL ... --prefill PREFILL --json taper.json
    needle_torch.py MODEL asked.jsonl [--prefill PREFILL]... [--taper taper.json]... [--dtype f32] [--device cpu] [--save FILE]

A Llama forward pass of its own (no transformers, no safetensors), so that two implementations can be told apart from two sets of
questions. Prompts are attended by PREFILL, all of their rows; answers densely and greedily. PREFILL is a name or JSON as Taper
takes it, of three methods: `dense`; `streaming_llm`, a mask over sinks and a window; `delta` over either, by its paper's formula.
Attention is PyTorch's own, with masks spelt out.
"""
import argparse
import collections
import glob
import json
import os
import struct
import sys
import time

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
DEFAULTS = {
    "dense": {},
    "streaming_llm": {"sink": 4, "window": 2048},
    "delta": {"gamma": 64, "tail": 128, "mode": "delta", "base": {"method": "streaming_llm"}},
}
ROWS = 2048


def method(value):
    """A method's object with every default."""
    if value.get("method") not in DEFAULTS:
        sys.exit(f"no such prefill method here: {value}")
    filled = {**DEFAULTS[value["method"]], **value}
    if "base" in filled:
        filled["base"] = method(filled["base"])
    unknown = set(filled) - set(DEFAULTS[value["method"]]) - {"method"}
    if unknown or filled.get("mode", "delta") != "delta":
        sys.exit(f"not done here: {value}")
    return filled


def label(spec):
    if spec["method"] == "dense":
        return "dense"
    if spec["method"] == "streaming_llm":
        return f"streaming_llm {spec['sink']} + {spec['window']}"
    return f"delta {spec['gamma']}, tail {spec['tail']}, over {label(spec['base'])}"


# Attention of a prompt: q, k, v and what is returned are [heads, rows, head_dim].


def causal(q, k, v):
    return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def masked(q, k, v, seen):
    """seen [rows, keys]: whether the row reads the key."""
    return scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen[None, None])[0]


def sink_window(q, k, v, sink, window):
    """Row i reads the keys below `sink` and the `window` last ones, its own among them."""
    parts = []
    for start in range(0, q.shape[1], ROWS):
        rows = torch.arange(start, min(start + ROWS, q.shape[1]), device=q.device)
        near = max(start - window + 1, 0)
        keys = torch.cat([torch.arange(min(sink, near), device=q.device), torch.arange(near, int(rows[-1]) + 1, device=q.device)])
        seen = (keys <= rows[:, None]) & ((keys < sink) | (keys > rows[:, None] - window))
        parts.append(masked(q[:, rows], k[:, keys], v[:, keys], seen))
    return torch.cat(parts, 1)


def dense_rows(q, k, v, rows):
    """Dense attention of some rows alone."""
    parts = []
    for some in rows.split(ROWS):
        last = int(some.max()) + 1
        seen = torch.arange(last, device=q.device) <= some[:, None]
        parts.append(masked(q[:, some], k[:, :last], v[:, :last], seen))
    return torch.cat(parts, 1)


def delta(q, k, v, gamma, tail, base):
    """Every row before the tail takes the difference to dense attention of the last multiple of `gamma`; the tail is dense.

    It begins at a multiple of `gamma` and has max(tail, gamma) rows or a few more (n mod gamma more where gamma divides that);
    tail 0 is none.
    """
    n = q.shape[1]
    start = max(n - max(tail, gamma), 0) // gamma * gamma if tail else n
    sparse = attend(q, k, v, base)[:, :start].float()
    anchors = torch.arange(0, start, gamma, device=q.device)
    out = []
    if start:
        difference = dense_rows(q, k, v, anchors).float() - sparse[:, anchors]
        owner = torch.arange(start, device=q.device) // gamma
        out.append((sparse + difference[:, owner]).to(q.dtype))
    if start < n:
        out.append(dense_rows(q, k, v, torch.arange(start, n, device=q.device)))
    return torch.cat(out, 1)


def attend(q, k, v, spec):
    if spec["method"] == "dense":
        return causal(q, k, v)
    if spec["method"] == "streaming_llm":
        return sink_window(q, k, v, spec["sink"], spec["window"])
    return delta(q, k, v, spec["gamma"], spec["tail"], spec["base"])


class Llama:
    """Weights of a Hugging Face folder. Rotary angles and logits are float32 whatever the weights are."""

    def __init__(self, folder, dtype, device):
        with open(os.path.join(folder, "config.json")) as file:
            self.config = json.load(file)
        if self.config.get("rope_scaling") or self.config.get("attention_bias") or self.config.get("mlp_bias"):
            sys.exit("config.json: scaled rotary embeddings and biases are not done here")
        self.weights, self.dtype, self.device = {}, dtype, device
        for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
            self.read(path)
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", self.embedding).float()
        self.q_heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.q_heads
        half = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
        self.frequencies = self.config["rope_theta"] ** -half

    def read(self, path):
        """A safetensors file: the header's length, the header in JSON, the tensors' bytes."""
        with open(path, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            data = bytearray(file.read())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            tensor = torch.frombuffer(data[start:end], dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
            self.weights[name] = tensor.to(self.device, self.dtype)

    def rotate(self, x, at):
        """x [heads, rows, head_dim] from position `at` on; the first half of a head turns with the second."""
        angles = torch.arange(at, at + x.shape[1], dtype=torch.float64, device=self.device)[:, None] * self.frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(self.dtype)

    def norm(self, x, name):
        weight = self.weights[name]
        return rms_norm(x.float(), weight.shape, None, self.config["rms_norm_eps"]).to(self.dtype) * weight

    def forward(self, tokens, cache, at, spec):
        """Takes in tokens from position `at` on; the logits after the last one. cache [layers, 2, kv_heads, tokens, head_dim].

        `spec` says how a prompt is attended. Later tokens come one by one and read all that is cached.
        """
        x, rows = self.embedding[tokens], len(tokens)
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            h = self.norm(x, prefix + "input_layernorm.weight")
            q, k, v = ((h @ self.weights[f"{prefix}self_attn.{name}_proj.weight"].T).view(rows, -1, self.head_dim).transpose(0, 1) for name in "qkv")
            q = self.rotate(q, at)
            cache[layer, 0, :, at:at + rows], cache[layer, 1, :, at:at + rows] = self.rotate(k, at), v
            # Query head h reads KV head h // group.
            k, v = (kept[:, :at + rows].repeat_interleave(self.q_heads // self.kv_heads, 0) for kept in cache[layer])
            out = attend(q, k, v, spec) if spec else scaled_dot_product_attention(q[None], k[None], v[None])[0]
            x = x + out.transpose(0, 1).reshape(rows, -1) @ self.weights[prefix + "self_attn.o_proj.weight"].T
            h = self.norm(x, prefix + "post_attention_layernorm.weight")
            gate, up = (h @ self.weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (silu(gate) * up) @ self.weights[prefix + "mlp.down_proj.weight"].T
        return self.norm(x[-1], "model.norm.weight").float() @ self.head.T

    @torch.inference_mode()
    def answer(self, prompt, spec, most, ends):
        """Greedy tokens up to an end token, which is left out, or `most` of them; and the gap between the two best logits of each."""
        room = (self.config["num_hidden_layers"], 2, self.kv_heads, len(prompt) + most, self.head_dim)
        cache = torch.empty(room, dtype=self.dtype, device=self.device)
        logits = self.forward(torch.tensor(prompt, device=self.device), cache, 0, spec)
        tokens, gaps = [], []
        while True:
            best = logits.topk(2)
            gaps.append(round(float(best.values[0] - best.values[1]), 4))
            token = int(best.indices[0])
            if token in ends:
                return tokens, gaps
            tokens.append(token)
            if len(tokens) == most:
                return tokens, gaps
            logits = self.forward(torch.tensor([token], device=self.device), cache, len(prompt) + len(tokens) - 1, None)


class Text:
    """Tokens to text: byte-level BPE, in which each byte is written as a printable character."""

    def __init__(self, folder):
        with open(os.path.join(folder, "tokenizer.json")) as file:
            tokenizer = json.load(file)
        if tokenizer["decoder"]["type"] != "ByteLevel":
            sys.exit("tokenizer.json: only byte-level BPE is read here")
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        added = {entry["id"]: entry for entry in tokenizer["added_tokens"]}
        self.bytes = {i: bytes(byte_of[c] for c in piece) for piece, i in tokenizer["model"]["vocab"].items() if i not in added}
        self.bytes |= {i: b"" if entry["special"] else entry["content"].encode() for i, entry in added.items()}

    def decode(self, tokens):
        return b"".join(self.bytes[token] for token in tokens).decode(errors="replace")


def end_tokens(folder):
    path = os.path.join(folder, "generation_config.json")
    with open(path if os.path.exists(path) else os.path.join(folder, "config.json")) as file:
        ends = json.load(file)["eos_token_id"]
    return set(ends) if isinstance(ends, list) else {ends}


def share_found(answer, wanted):
    return sum(want.lower() in answer.lower() for want in wanted) / len(wanted)


def taper_records(paths):
    """Taper's answers that were decoded densely, by seed, task, length, sample and prefill method."""
    found = {}
    for path in paths:
        with open(path) as file:
            results = json.load(file)
        if results["question"] != "prefill":
            sys.exit(f"{path}: its questions are attended another way than its contexts")
        for record in results["records"]:
            if results["decodes"][record["decode"]]["spec"]["method"] != "dense":
                continue
            spec = results["prefills"][record["prefill"]]["spec"]
            if spec["method"] in DEFAULTS:
                key = (results["seed"], record["task"], record["length"], record["sample"], json.dumps(method(spec), sort_keys=True))
                found[key] = record
    return found


def beside(asked, spec, records):
    """Taper's answer to the same prompt, if there is one."""
    key = (asked["seed"], asked["task"], asked["length"], asked["sample"], json.dumps(spec, sort_keys=True))
    record = records.get(key)
    if record and (record["prompt_tokens"], record["wanted"]) != (len(asked["tokens"]), asked["wanted"]):
        sys.exit(f"{key[:4]}: Taper's question was another one")
    return record


def table(answers, with_taper):
    cells = collections.defaultdict(list)
    for answer in answers:
        cells[answer["length"], answer["task"], answer["prefill"]].append(answer)
    head = ["tokens", "task", "prefill", "samples", "PyTorch"]
    print("| " + " | ".join(head + (["both", "Taper", "difference", "scores differ", "answers differ"] if with_taper else [])) + " |")
    print("|" + " --- |" * (len(head) + 5 * with_taper))
    for (length, task, prefill), cell in cells.items():
        mean = 100 * sum(a["score"] for a in cell) / len(cell)
        row = [length, task, prefill, len(cell), f"{mean:.1f}"]
        both = [a for a in cell if "taper_score" in a]
        if both:
            theirs, ours = (100 * sum(a[key] for a in both) / len(both) for key in ("taper_score", "score"))
            scores = sum(abs(a["score"] - a["taper_score"]) > 1e-9 for a in both)
            texts = sum(a["answer"] != a["taper_answer"] for a in both)
            row += [len(both), f"{theirs:.1f}", f"{theirs - ours:+.1f}", scores, texts]
        elif with_taper:
            row += [0, "", "", "", ""]
        print("| " + " | ".join(map(str, row)) + " |")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="a Hugging Face folder")
    options.add_argument("prompts", nargs="+", help="what `taper eval needle --prompts` wrote")
    options.add_argument("--prefill", action="append", help="a method's name or JSON; may be repeated [default: dense]")
    options.add_argument("--taper", action="append", default=[], help="what `taper eval needle --json` wrote; may be repeated")
    options.add_argument("--dtype", choices=["bf16", "f32"], default="bf16", help="of weights, activations and cache")
    options.add_argument("--device", default="cuda")
    options.add_argument("--save", help="write every answer to this file, and the gap between the two best logits at each token")
    options = options.parse_args()
    specs = [method(json.loads(p) if p.lstrip().startswith("{") else {"method": p}) for p in options.prefill or ["dense"]]
    model = Llama(options.model, {"bf16": torch.bfloat16, "f32": torch.float32}[options.dtype], options.device)
    text, ends, records = Text(options.model), end_tokens(options.model), taper_records(options.taper)
    answers, started = [], time.perf_counter()
    for path in options.prompts:
        with open(path) as file:
            asked_of = [json.loads(line) for line in file]
        for asked in asked_of:
            for spec in specs:
                tokens, gaps = model.answer(asked["tokens"], spec, asked["answer_tokens"], ends)
                answer = {key: asked[key] for key in ("task", "length", "sample", "seed", "wanted")}
                answer |= {"prefill": label(spec), "answer": text.decode(tokens), "tokens": tokens, "gaps": gaps}
                answer["score"] = share_found(answer["answer"], asked["wanted"])
                record = beside(asked, spec, records)
                if record:
                    answer |= {"taper_score": record["score"], "taper_answer": record["answer"]}
                answers.append(answer)
                if options.save:
                    with open(options.save, "w") as file:
                        json.dump(answers, file)
    print(f"PyTorch {torch.__version__}, {options.device}, {options.dtype}: {len(answers)} answers in {time.perf_counter() - started:.0f} s\n")
    table(answers, bool(options.taper))


main()
