#!/usr/bin/env python3
"""How long a client waits for the first token of a long prompt, at llama-3.1-8b's cost, through the server.

    python3 bench/gpu/ttft.py --taper TAPER --small FOLDER --out FOLDER [--length 131072] [--prompts 2]
        [--attention '{"prefill": …}']… [-- further arguments of taper serve]

Makes a checkpoint of that shape and random weights in OUT, unless it is there, with the tokenizer of SMALL, a model's folder, serves it on a
CUDA device and asks for prompts of random tokens, one at a time, each with every attention. PyTorch besides the standard library; loopback only.
"""
import argparse
import json
import os
import random
import shutil
import sys
import threading
import time

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from beside import Stream  # noqa: E402
from cpu import Server, free_port  # noqa: E402

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 32, 8, 128


def shapes(vocabulary):
    yield "model.embed_tokens.weight", (vocabulary, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (HIDDEN,)
        yield layer + "post_attention_layernorm.weight", (HIDDEN,)
        yield layer + "self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield layer + "self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield layer + "self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield layer + "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield layer + "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield layer + "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield layer + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (vocabulary, HIDDEN)


def make(small, out, length):
    """The checkpoint: one safetensors file, a tensor at a time."""
    os.makedirs(out, exist_ok=True)
    for name in os.listdir(small):
        if name.endswith((".json", ".jinja")) and not name.endswith(".index.json"):
            shutil.copy(os.path.join(small, name), out)
    with open(os.path.join(small, "config.json")) as f:
        config = json.load(f)
    config.pop("rope_scaling", None)
    config |= {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "max_position_embeddings": length + 1024, "torch_dtype": "bfloat16",
    }
    header, at = {}, 0
    for name, shape in shapes(config["vocab_size"]):
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(out, "model.safetensors"), "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes(config["vocab_size"]):
            x = torch.ones(shape, device="cuda") if len(shape) == 1 else torch.randn(shape, device="cuda") / shape[1] ** 0.5
            x.to(torch.bfloat16).view(torch.int16).cpu().numpy().tofile(f)
    # Last, so that what is half made is made again.
    with open(os.path.join(out, "config.json"), "w") as f:
        json.dump(config, f)
    torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taper", required=True)
    parser.add_argument("--small", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--attention", action="append", type=json.loads)
    parser.add_argument("rest", nargs="*")
    args = parser.parse_args()
    begun = time.time()
    if not os.path.exists(os.path.join(args.out, "config.json")):
        make(args.small, args.out, args.length)
    print(f"checkpoint after {time.time() - begun:.0f} s", flush=True)
    port = free_port()
    command = [args.taper, "serve", "--model", args.out, "--device", "cuda", "--kv-dtype", "bf16", "--port", str(port), *args.rest]
    server = Server(command, port, log=None)
    print(f"ready {server.ready_s:.0f} s after its start", flush=True)
    for i in range(args.prompts):
        for attention in args.attention or [{"prefill": {"method": "dense"}}]:
            prompt = [random.randrange(1000, 20000) for _ in range(args.length - 16)]
            start = time.perf_counter()
            stream = Stream(port, {"prompt": prompt, "max_tokens": 8, "attention": attention}, threading.Event())
            stream.join()
            if stream.failed or not stream.stamps:
                raise SystemExit(f"{attention}: {stream.failed}")
            print(f"prompt {i}: {json.dumps(attention)}: first token after {stream.stamps[0] - start:.2f} s", flush=True)
    server.stop()


if __name__ == "__main__":
    main()
