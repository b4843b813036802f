#!/usr/bin/env python3
"""Trains tiny tokenizers of every supported kind and records what their own libraries make of some texts.

Byte-level ones, one for each pre-tokenizer, are written as tokenizer.json by Hugging Face tokenizers; the
SentencePiece one as the vocabulary that a GGUF file would hold. Everything goes to
crates/taper-model/tests/golden/tokenizers/, with each text's tokens.

Needs tokenizers and sentencepiece. Run it from the repository's root:
    python scripts/golden/tokenizers.py
"""

import io
import json
import sys
from pathlib import Path

# This file's own name would otherwise hide the library.
sys.path = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]

import sentencepiece  # noqa: E402
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

OUT = Path("crates/taper-model/tests/golden/tokenizers")

CORPUS = [
    "A thin candle lights the room, and the room lights the reader's page.",
    "They're here; we've seen 12345 of them, haven't we? I'd say so, and you'll agree.",
    "El río corre hacia el mar; la forêt s'étend jusqu'à la côte; die Straße führt über die Brücke.",
    "HelloWorld camelCaseWords HTTPServer parseJSON42 snake_case_words",
    "def main(args):\n    for i in range(10):\n        print(i * 3.14)\n\n\treturn None\r\n",
    "数を数える。一、二、三。Привет, мир! Γειά σου Κόσμε. 안녕하세요 세계",
    "The reader reads the page, the page names the river, and the river runs to the sea.",
]
TEXTS = [
    "",
    " ",
    "The river runs.",
    "  two spaces   and a tail  ",
    "They're sure I'd've SAID it'll work, HE'LL see",
    "1 12 123 1234 12345678 3.14159 ٣٤٥ Ⅷ",
    "HelloWorld HTTPServer éÉtéLa ǅungla ʰello",
    "line\nbreaks\r\n\r\n\n  indented\n\ttab \t both",
    "数える река Straße 안녕 🙂👩‍👩‍👧 e\u0301 \u200b \ufeff",
    "path/to/file.txt?a=b&c=[d] ... !!! --- ___",
    "<s>marked</s> text <tool>call</tool> end",
    "▁ under ▁▁ scores",
]
SPECIAL = ["<unk>", "<s>", "</s>"]

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WHOLE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


# The name in a GGUF file: (pre-tokenizer, whether whole words are looked up before merging)
BYTE_LEVEL = {
    "gpt-2": (WHOLE, False),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WHOLE]), False),
    "llama-bpe": (split(LLAMA3), True),
    "tekken": (split(TEKKEN), True),
}


def byte_level(name: str) -> None:
    pre_tokenizer, ignore_merges = BYTE_LEVEL[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    cases = []
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        cases.append({"text": text, "tokens": tokens, "decoded": tokenizer.decode(tokens, skip_special_tokens=True)})
    write(f"{name}.json", {"tokenizer": json.loads(tokenizer.to_str()), "cases": cases})


def sentence_piece() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines() if line]),
        model_writer=model,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())

    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return 2
        return 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1

    cases = []
    for text in TEXTS:
        # The library does not read special tokens' names in a text, and an empty text has no prefix there.
        if "<" not in text and text:
            tokens = processor.encode(text)
            cases.append({"text": text, "tokens": tokens, "decoded": processor.decode(tokens)})
    vocabulary = {
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "types": [kind(i) for i in ids],
    }
    write("sentencepiece.json", vocabulary | {"cases": cases})


def write(name: str, content: dict) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (OUT / name).write_text(text + "\n")
    print(f"{name}: {len(text.encode())} bytes, {len(content['cases'])} texts")


if __name__ == "__main__":
    for name in BYTE_LEVEL:
        byte_level(name)
    sentence_piece()
