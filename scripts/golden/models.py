#!/usr/bin/env python3
"""Makes tiny random checkpoints of every supported variant and records what transformers computes with them.

Each variant becomes a folder under crates/taper-model/tests/golden/: config.json as published checkpoints write it,
model.safetensors, and golden.safetensors with the tokens and, in f32, the logits at every position.

Needs torch (CPU is enough), transformers and safetensors. Run it from the repository's root:
    python scripts/golden/models.py
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

OUT = Path("crates/taper-model/tests/golden")
TOKENS = 40
HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 2, 16, 64

BASE = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0}
MISTRAL = BASE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}

# Llama 1 and 2 have no head_dim of their own and, at 7B, one KV head for each query head.
LLAMA1 = LLAMA | {"hidden_size": HEADS * 8, "num_key_value_heads": HEADS, "rms_norm_eps": 1e-6}
del LLAMA1["head_dim"]

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# name: (configuration, dtype of the file, files)
VARIANTS = {
    "llama1": (LLAMA1, torch.float16, 1),
    "llama2-gqa": (LLAMA | {"rope_scaling": None}, torch.bfloat16, 1),
    "llama3": (LLAMA | {"rope_theta": 500000.0, "eos_token_id": [2, 3]}, torch.bfloat16, 2),
    "llama3.1": (LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING}, torch.float32, 1),
    "llama3.2-tied": (
        LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING | {"factor": 32.0}, "tie_word_embeddings": True},
        torch.bfloat16,
        1,
    ),
    "linear": (LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}, torch.bfloat16, 1),
    # The prompt is longer than the trained context, so the base has grown.
    "dynamic": (
        LLAMA | {"max_position_embeddings": 16, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        torch.bfloat16,
        1,
    ),
    "yarn": (
        LLAMA
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        torch.bfloat16,
        1,
    ),
    "yarn-mscale": (
        LLAMA
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
        torch.bfloat16,
        1,
    ),
    # SmolLM2's proportions: an odd number of heads, tied.
    "smollm2": (
        LLAMA
        | {
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 4,
            "tie_word_embeddings": True,
            "rope_theta": 100000.0,
        },
        torch.bfloat16,
        1,
    ),
    # The window is shorter than the prompt.
    "mistral-v0.1": (MISTRAL | {"rope_theta": 10000.0, "sliding_window": 16}, torch.bfloat16, 1),
    "mistral-v0.2": (MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None}, torch.bfloat16, 1),
    "mistral-v0.3": (MISTRAL | {"vocab_size": 68, "rope_theta": 1000000.0, "sliding_window": None}, torch.float16, 1),
    # Heads narrower in all than the residual stream, as in NeMo (32 x 128 beside 5120).
    "mistral-nemo": (
        MISTRAL | {"hidden_size": 40, "head_dim": 8, "rope_theta": 1000000.0, "sliding_window": None},
        torch.bfloat16,
        1,
    ),
}


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that attention is far from uniform and errors show."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data = 1.0 + 0.2 * noise
        elif "embed_tokens" in name:
            parameter.data = 0.5 * noise
        else:
            parameter.data = 1.5 * noise / parameter.shape[1] ** 0.5


def write_weights(folder: Path, state: dict[str, torch.Tensor], files: int) -> None:
    names = sorted(state)
    if files == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = {name: state[name] for name in names[i::files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def make(name: str, seed: int) -> None:
    config, dtype, files = VARIANTS[name]
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").eval()
    randomise(model, generator)
    state = {k: v.to(dtype).contiguous() for k, v in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del state["lm_head.weight"]
    write_weights(folder, state, files)
    # Read back, so that the logits are those of the rounded weights.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(0, config["vocab_size"], (1, TOKENS), generator=generator)
    with torch.no_grad():
        logits = model(tokens).logits[0]
    assert logits.dtype == torch.float32
    save_file({"tokens": tokens[0].to(torch.int64), "logits": logits.contiguous()}, folder / "golden.safetensors")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name}: {size} bytes, logits within ±{logits.abs().max():.1f}")


if __name__ == "__main__":
    for seed, name in enumerate(VARIANTS):
        make(name, seed)
