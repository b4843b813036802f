#!/usr/bin/env python3
"""Renders conversations with transformers' template engine and records the strings, or that it refused.

Templates lie in crates/taper-model/tests/golden/templates/*.jinja: our own, in the prompt formats that Llama 3.1 and
Mistral v0.3 document and with the constructs that their templates use. SmolLM2's own comes from its GGUF file.
The cases are written to templates/cases.json beside them.

Needs transformers, jinja2 and gguf. Run it from the repository's root:
    python scripts/golden/templates.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import sys
from pathlib import Path

from gguf import GGUFReader
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

OUT = Path("crates/taper-model/tests/golden/templates")

HELLO = {"role": "user", "content": "Hello there!"}
SYSTEM = {"role": "system", "content": "  You are a pirate. \n"}
REPLY = {"role": "assistant", "content": " Ahoy! What be ye wantin'? "}
THOUGHT = {"role": "user", "content": "<think>hm</think>the</think>answer"}
ASK = {"role": "user", "content": "Say \"ship\" in Français & 日本語 <b>🚢</b>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place, in °C",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A city, such as \"Paris\""},
                "days": {"type": "integer", "default": 1, "minimum": 0.5},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Tells the time", "parameters": {}}}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "abcdef123", "type": "function", "function": {"name": "get_weather", "arguments": {"place": "Zürich", "days": 2}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "content": "{\"celsius\": 18.5}"}
SETTINGS = {"b": True, "a": None, "float": 1.0, "small": 1e-7, "list": [1, "two", None], "nested": {"z": "é\n\"", "a": [1, {"x": []}]}}

LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
MISTRAL = {"bos_token": "<s>", "eos_token": "</s>"}
SMOL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

# template, messages, variables, add_generation_prompt; None: the last message goes on
CASES = [
    *[(name, messages, tokens, prompt)
      for name, tokens in [("llama-3.1", LLAMA), ("mistral-v0.3", MISTRAL), ("smollm2", SMOL)]
      for messages in [[HELLO], [SYSTEM, HELLO], [HELLO, REPLY, ASK], [SYSTEM, HELLO, REPLY, ASK]]
      for prompt in [False, True]],
    ("llama-3.1", [HELLO], LLAMA | {"tools": [WEATHER, CLOCK]}, True),
    ("llama-3.1", [SYSTEM, ASK], LLAMA | {"tools": [WEATHER], "tools_in_user_message": False, "date_string": "1 Jan 2025"}, True),
    ("llama-3.1", [HELLO, CALL, RESULT], LLAMA | {"tools": [WEATHER]}, True),
    ("llama-3.1", [HELLO, CALL, RESULT, REPLY, ASK], LLAMA, False),
    ("llama-3.1", [HELLO, CALL | {"tool_calls": CALL["tool_calls"] * 2}], LLAMA, False),
    ("llama-3.1", [HELLO], LLAMA | {"builtin_tools": ["brave_search", "code_interpreter"]}, True),
    ("llama-3.1", [SYSTEM], LLAMA | {"tools": [CLOCK]}, True),
    ("mistral-v0.3", [HELLO], MISTRAL | {"tools": [WEATHER, CLOCK]}, True),
    ("mistral-v0.3", [SYSTEM, HELLO, CALL, RESULT], MISTRAL | {"tools": [WEATHER]}, False),
    ("mistral-v0.3", [HELLO, CALL, RESULT, REPLY, ASK], MISTRAL | {"tools": [WEATHER]}, False),
    ("mistral-v0.3", [HELLO, HELLO], MISTRAL, False),
    ("mistral-v0.3", [HELLO, SYSTEM], MISTRAL, False),
    ("mistral-v0.3", [HELLO, CALL | {"tool_calls": [CALL["tool_calls"][0] | {"id": "short"}]}], MISTRAL, False),
    *[(name, [HELLO, REPLY | {"content": content}], tokens, None)
      for name, tokens in [("llama-3.1", LLAMA), ("mistral-v0.3", MISTRAL), ("smollm2", SMOL)]
      for content in [" Ahoy! What be", "end", "one\n\n", "Hello there!", "{\"a\": "]],
    ("python-idioms", [HELLO], {"settings": SETTINGS}, False),
    ("python-methods", [THOUGHT], {"roles": ["system", "user"], "loop_index": 4}, False),
]


def main() -> None:
    texts = {path.stem: path.read_text() for path in OUT.glob("*.jinja")}
    texts["smollm2"] = GGUFReader(sys.argv[1]).get_field("tokenizer.chat_template").contents()
    cases = []
    for name, messages, variables, prompt in CASES:
        case = {"template": name, "messages": messages, "variables": variables, "add_generation_prompt": prompt}
        try:
            rendered, _ = render_jinja_template(
                [messages], chat_template=texts[name], add_generation_prompt=prompt or False,
                continue_final_message=prompt is None, **{"tools": None} | variables
            )
            case["rendered"] = rendered[0]
        except TemplateError as error:
            case["refused"] = str(error)
        cases.append(case)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (OUT / "cases.json").write_text(f"[\n{lines}\n]\n")
    refused = sum("refused" in case for case in cases)
    print(f"{len(cases)} cases, {refused} refused")


if __name__ == "__main__":
    main()
