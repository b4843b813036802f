"""One-token steps of Hugging Face transformers and of Taper, one after the other on one GPU.

    python3 bench/gpu/peer.py --taper target/release/taper [--shape llama-3.1-8b] [--context 2048,32768,131072]

Random bf16 weights of the shape, batch 1, a cache filled with random rows, SDPA. A step goes from a token to the likeliest next
one in host memory (Taper: `--greedy`); medians of as many steps as Taper takes. transformers runs eagerly with the cache that
`generate` has by default, and compiled ("reduce-overhead", which is CUDA graphs) with a static cache; the first calls, which
compile, are not timed. Needs PyTorch and transformers; without --taper it measures them alone.
"""
import argparse
import gc
import statistics
import subprocess
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

SHAPES = {
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256, 5e5, False),
    "mistral-7b": (4096, 14336, 32, 32, 8, 128, 32768, 1e6, False),
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49152, 1e5, True),
    "tiny": (64, 128, 2, 4, 2, 16, 256, 1e4, True),
}


def build(shape, device):
    hidden, inner, layers, heads, kv_heads, dim, vocabulary, theta, tied = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, vocab_size=vocabulary, tie_word_embeddings=tied,
        max_position_embeddings=1 << 20, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": theta})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval(), config


def rows(config, tokens, device):
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]


def default_cache(config, context, _, device):
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(*rows(config, context, device), layer)
    return cache


def static_cache(config, context, room, device):
    cache = StaticCache(config=config, max_cache_len=context + room)
    for layer in cache.layers:
        keys, values = rows(config, context, device)
        # Allocates, and counts no token.
        layer.lazy_initialization(keys, values)
        layer.keys[:, :, :context] = keys
        layer.values[:, :, :context] = values
        layer.cumulative_length.fill_(context)
    return cache


@torch.inference_mode()
def steps(forward, cache, tokens, device, warm):
    """Seconds of each step."""
    token, seconds = torch.ones((1, 1), dtype=torch.long, device=device), []
    for step in range(warm + tokens):
        torch.compiler.cudagraph_mark_step_begin()
        started = time.perf_counter()
        logits = forward(input_ids=token, past_key_values=cache, use_cache=True).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        token.item()
        if step >= warm:
            seconds.append(time.perf_counter() - started)
    return seconds


def ways(model):
    yield "eager", model.forward, default_cache
    torch._dynamo.reset()
    # Not dynamic: a second context gets kernels of its own, as a process that has just this one does.
    yield "compiled", torch.compile(model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False), static_cache


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    options.add_argument("--context", default="2048,32768,131072")
    options.add_argument("--tokens", type=int, default=32)
    options.add_argument("--device", default="cuda")
    options.add_argument("--taper", help="the program, built with the feature cuda")
    options = options.parse_args()
    if options.taper:
        subprocess.run([options.taper, "bench", "model", "--shape", options.shape, "--random", "--device", options.device,
                        "--context", options.context, "--tokens", str(options.tokens), "--greedy"], check=True)
    if options.device == "cuda":
        print(torch.cuda.get_device_name(), end=", ")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {options.shape}, batch 1, bf16")
    model, config = build(options.shape, options.device)
    print("| context | transformers | step ms | least | most | first call s |\n| --- | --- | --- | --- | --- | --- |")
    for context in map(int, options.context.split(",")):
        for name, forward, make in ways(model):
            warm = 6
            cache = make(config, context, warm + options.tokens + 2, options.device)
            started = time.perf_counter()
            steps(forward, cache, 1, options.device, 0)
            first = time.perf_counter() - started
            ms = [1e3 * s for s in steps(forward, cache, options.tokens, options.device, warm)]
            print(f"| {context} | {name} | {statistics.median(ms):.2f} | {min(ms):.2f} | {max(ms):.2f} | {first:.1f} |", flush=True)
            del cache
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()


main()
