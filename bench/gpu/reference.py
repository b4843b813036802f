"""Greedy answers of transformers in float32, in the file that `tokens.py` compares a server with.

    reference.py MODEL FILE [--tokens 48] [--lengths 8000,32000] [--prompts 2] [--questions 1] [--device cuda]

Prompts of needles, as `tokens.py --needles` asks them. Needs PyTorch and transformers.
"""
import argparse
import json

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

import prompts

PIECE = 4096


@torch.inference_mode()
def answer(model, tokenizer, text, count):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    cache, out = DynamicCache(config=model.config), {"tokens": [], "token_logprobs": [], "top_logprobs": [], "prompt_tokens": len(ids)}
    for at in range(0, len(ids), PIECE):
        piece = torch.tensor([ids[at:at + PIECE]], device=model.device)
        logits = model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    for _ in range(count):
        best = torch.log_softmax(logits[0, -1].double(), -1).topk(2)
        names, values = [tokenizer.decode([i], skip_special_tokens=False) for i in best.indices.tolist()], best.values.tolist()
        out["tokens"].append(names[0])
        out["token_logprobs"].append(values[0])
        out["top_logprobs"].append(dict(zip(names, values)))
        logits = model(input_ids=best.indices[None, :1], past_key_values=cache, use_cache=True).logits
    return out


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("file")
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--lengths", default="8000,32000")
    options.add_argument("--prompts", type=int, default=2)
    options.add_argument("--questions", type=int, default=1)
    options.add_argument("--device", default="cuda")
    options = options.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="sdpa").to(options.device)
    tokenizer, kept = Tokenizer.from_file(options.model + "/tokenizer.json"), {}
    for length in map(int, options.lengths.split(",")):
        for seed in range(options.prompts):
            for question in range(options.questions):
                text, wanted = prompts.needles(length, seed, question)
                said = answer(model, tokenizer, text, options.tokens)
                kept[json.dumps([text, options.tokens, None])] = said
                print(f"{said['prompt_tokens']} tokens, {seed}, {'found' if wanted in ''.join(said['tokens']) else 'not found'}", flush=True)
    with open(options.file, "w") as file:
        json.dump(kept, file)


main()
