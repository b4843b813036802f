"""Prompts of a seed and a length: random words, or RULER's needles among needles for a model that finds them."""
import random
import uuid

WORDS = """the a of and river stone morning letter captain garden winter voice number answer city
silver road quiet seven window table under before carried found never opened little great house""".split()
# What a line of each kind is for needle's tokenizer, which splits numbers into digits.
LINE_TOKENS = {"numbers": 25, "uuids": 80}


def words(length, seed):
    pick = random.Random(seed)
    return f"Once upon a time, story number {seed}: " + " ".join(pick.choice(WORDS) for _ in range(length)) + ". And then"


def needles(tokens, seed, question=0):
    """About so many tokens, and what is asked for; seeds take turns between UUIDs and numbers. Questions share their haystack."""
    kind = "uuids" if seed % 2 == 0 else "numbers"
    pick = random.Random(f"{kind} {tokens} {seed}")
    value = {"uuids": lambda: str(uuid.UUID(int=pick.getrandbits(128), version=4)),
             "numbers": lambda: str(pick.randrange(1_000_000, 10_000_000))}[kind]
    key = value if kind == "uuids" else lambda: f"{pick.choice(WORDS)}-{pick.choice(WORDS)}-{pick.randrange(100)}"
    keys = {key(): value() for _ in range((tokens - 200) // LINE_TOKENS[kind])}
    lines = "\n".join(f"One of the special magic {kind} for {k} is: {v}." for k, v in keys.items())
    asked = random.Random(f"{question} {seed}").choice(list(keys))
    return (f"<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n"
            f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about the "
            f"{kind} afterwards.\n{lines}\nWhat is the special magic {kind[:-1]} for {asked} mentioned in the provided text?<|im_end|>\n"
            f"<|im_start|>assistant\nThe special magic {kind[:-1]} for {asked} mentioned in the provided text is"), keys[asked]
