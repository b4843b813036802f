#!/usr/bin/env python3
"""Records how transformers continues ten prompts with SmolLM2-135M-Instruct, read from the GGUF that Taper serves.

transformers dequantises the file to f32. For each prompt: its tokens, 64 greedy tokens, and at each of them the gap
between the best and the second-best logit, which tells a real difference from a tie that rounding may break either
way. Written to crates/taper-model/tests/golden/smollm2-greedy.json.

Needs torch (CPU is enough), transformers, accelerate and gguf. Run it from the repository's root:
    python scripts/golden/smollm2.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

OUT = Path("crates/taper-model/tests/golden/smollm2-greedy.json")
NEW_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at 100 degrees Celsius because",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "Dear Mr. Holmes,\n\nI am writing to you about",
    "Les chats sont des animaux qui",
    "1, 1, 2, 3, 5, 8, 13,",
    "Photosynthesis is the process by which",
    "<|im_start|>user\nWrite a haiku about autumn.<|im_end|>\n<|im_start|>assistant\n",
]


def main() -> None:
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    cases = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        case = {"prompt": prompt, "tokens": tokens[0].tolist(), "greedy": [], "gaps": []}
        past = None
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                out = model(tokens, past_key_values=past, use_cache=True)
                past = out.past_key_values
                best = out.logits[0, -1].float().topk(2)
                case["greedy"].append(best.indices[0].item())
                case["gaps"].append(float(f"{(best.values[0] - best.values[1]).item():.4g}"))
                tokens = best.indices[:1].view(1, 1)
        cases.append(case)
        print(repr(prompt), "->", repr(tokenizer.decode(case["greedy"])), "smallest gap", min(case["gaps"]))
    OUT.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
