"""Requests made up from the server's own openapi.json: none breaks it, and what comes back is as the document says."""

import json
import urllib.request

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

LENGTHS = ["max_tokens", "max_completion_tokens", "max_output_tokens"]
# What each operation answered.
STATUSES = {}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="session")
def document(address):
    return schemathesis.openapi.from_url(address + "/openapi.json")


api = schemathesis.pytest.from_fixture("document")


def small(body):
    """What is asked for is kept small: a request may well want 32 answers of 9,000 tokens. A timeout of no time is a 504 rightly."""
    if isinstance(body, dict):
        # What is null is as if it were not there.
        body = {name: value for name, value in body.items() if value is not None or name not in LENGTHS}
        # What is almost never right would leave little else to be seen: names of models, numbers in an embedding, tiny errors, what goes
        # with some last messages alone.
        for name in ["timeout", "dimensions", "model", "add_generation_prompt", "continue_final_message"]:
            body.pop(name, None)
        for name in ["epsilon", "delta"]:
            if isinstance(body.get(name), float):
                body[name] = max(body[name], 0.01)
        for name in [*LENGTHS, "n", "best_of"]:
            if isinstance(body.get(name), (int, float)) and not isinstance(body[name], bool):
                body[name] = min(body[name], 4 if name in LENGTHS else 2)
                # No tokens are right only where the prompt is echoed.
                if name in LENGTHS and body[name] == 0 and body.get("echo") is not True:
                    body[name] = 1
        if "messages" in body or "input" in body or "prompt" in body:
            body.setdefault("max_output_tokens" if "input" in body else "max_tokens", 2)
            if isinstance(body.get("min_tokens"), int):
                body["min_tokens"] = min(body["min_tokens"], 2)
    return body


@api.parametrize()
# The first that fails is told as it is: to look for a smaller one takes longer than to read it.
@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
def test_api(case):
    case.body = small(case.body)
    answer = case.call_and_validate(checks=CHECKS, timeout=120)
    STATUSES.setdefault(case.operation.label, []).append(answer.status_code)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream_options": {"include_usage": True}},
        ),
        ("/v1/completions", {"prompt": ["Hi,", "You"], "max_tokens": 3, "logprobs": 1, "echo": True}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}),
    ],
)
def test_streams_are_as_the_document_says(document, path, body):
    case = document[path]["POST"].Case(body={**body, "stream": True}, media_type="application/json")
    answer = case.call_and_validate(checks=CHECKS, timeout=120)
    assert answer.headers["content-type"] == ["text/event-stream"]


def test_requests_were_not_all_refused():
    assert len(STATUSES) >= 13, STATUSES.keys()
    never = [name for name, seen in STATUSES.items() if "{id}" not in name and 200 not in seen]
    assert not never, never


def unknown(document, schema, value, path="answer"):
    """Paths in a value that its schema says nothing of."""
    if isinstance(schema, bool):
        return []
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return unknown(document, document["components"]["schemas"][name], value, path)
    parts = [part for word in ("allOf", "oneOf", "anyOf") for part in schema.get(word, [])]
    if isinstance(value, list):
        found = [unknown(document, schema.get("items", {}), one, f"{path}[{i}]") for i, one in enumerate(value)]
    elif isinstance(value, dict):
        known = schema.get("properties", {})
        found = [
            unknown(document, known[name], one, f"{path}.{name}") if name in known else [f"{path}.{name}"]
            for name, one in value.items()
        ]
    else:
        return []
    found = [one for some in found for one in some]
    # Each part of a schema may know some of it.
    for part in parts:
        found = [one for one in found if one in set(unknown(document, part, value, path))]
    return found


def test_the_document_tells_of_everything_in_an_answer(address):
    def fetch(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(address + path, data), timeout=120) as answer:
            return json.load(answer)

    document = fetch("/openapi.json")
    question = [{"role": "user", "content": "Say hello to the world, and to all that live in it."}]
    attention = {
        "prefill": {"method": "sample_attention", "min_tokens": 0},
        "decode": {"method": "vattention", "epsilon": 0.2, "delta": 0.2},
        "speculate": {"method": {"method": "streaming_llm"}, "tokens": 2},
        "audit": 1,
        "trace": True,
    }
    body = {"messages": question, "attention": attention, "max_tokens": 8, "n": 2, "logprobs": True, "top_logprobs": 1}
    answer = fetch("/v1/chat/completions", body)
    usage = answer["usage"]["attention"]
    for part in (usage["choices"][1]["trace"]["tokens"][0]["reads"], usage["decode"]["audit"]["delta"], usage["prefill"]["cra"]):
        assert part
    schemas = document["components"]["schemas"]
    assert unknown(document, schemas["ChatCompletion"], answer) == []
    assert unknown(document, schemas["ChatCompletion"], {**answer, "more": {}}) == ["answer.more"]
    text = {"prompt": "Hello,", "attention": attention, "max_tokens": 3, "echo": True, "logprobs": 2}
    assert unknown(document, schemas["TextCompletion"], fetch("/v1/completions", text)) == []
    answer = fetch("/v1/responses", {"input": "Hi", "max_output_tokens": 3})
    # The request's own, whatever that is.
    assert answer.pop("text") == {"format": {"type": "text"}}
    assert unknown(document, schemas["ResponseAnswer"], answer) == []
    assert unknown(document, schemas["Embeddings"], fetch("/v1/embeddings", {"input": "Hi"})) == []
