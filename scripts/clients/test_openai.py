"""The official OpenAI client against a real server: what it parses, it must like."""

import asyncio
import json
import time
import urllib.request

import openai
import pytest

QUESTION = [{"role": "user", "content": "Name the capital city of France in one word."}]
GREEDY = {"temperature": 0, "max_tokens": 24, "seed": 1}


def attention(usage):
    """`usage.attention`, which the client keeps as an extra field."""
    return usage.model_extra["attention"]


def test_models(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, **GREEDY)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert attention(answer.usage)["decode"]["method"] == "dense"


def test_chat_stream_equals_the_whole_answer(client, model):
    whole = client.chat.completions.create(model=model, messages=QUESTION, **GREEDY)
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, stream=True, stream_options=options, **GREEDY
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert attention(chunks[-1].usage)["prefill"]["density"] == 1.0


def test_the_clients_own_stream_helper(client, model):
    with client.chat.completions.stream(model=model, messages=QUESTION, **GREEDY) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == stream.get_final_completion().choices[0].message.content


def test_logprobs(client, model):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, logprobs=True, top_logprobs=3, **GREEDY
    )
    content = answer.choices[0].logprobs.content
    assert len(content[0].top_logprobs) == 3
    assert content[0].logprob == content[0].top_logprobs[0].logprob <= 0
    shown = b"".join(bytes(token.bytes) for token in content).decode()
    assert shown.strip() == answer.choices[0].message.content.strip()


def test_completions(client, model):
    whole = client.completions.create(model=model, prompt=["One, two,", "A, B,"], n=2, **GREEDY)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text
    stream = client.completions.create(model=model, prompt="One, two,", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_a_prompts_own_tokens_are_scored(client, model):
    """As programs that compare answers by their likelihood ask for it."""

    def score(prompt, **more):
        answer = client.completions.create(model=model, prompt=prompt, echo=True, logprobs=1, max_tokens=0, **more)
        logprobs = answer.choices[0].logprobs
        assert answer.choices[0].text == prompt and "".join(logprobs.tokens) == prompt
        assert answer.usage.completion_tokens == 0 and logprobs.token_logprobs[0] is None
        offsets = [len("".join(logprobs.tokens[:place])) for place in range(len(logprobs.tokens))]
        assert logprobs.text_offset == offsets
        return sum(logprobs.token_logprobs[1:])

    right = score("The capital city of France is Paris.")
    assert right > score("The capital city of France is Berlin.") > score("The capital city of France is sideways.")
    sparse = {"attention": {"prefill": {"method": "streaming_llm", "sink": 1, "window": 64}}}
    assert abs(score("The capital city of France is Paris.", extra_body=sparse) - right) < 1e-3, "the window holds all"


def test_words_and_tokens_that_may_come(client, model):
    def ask(**body):
        answer = client.chat.completions.create(model=model, messages=QUESTION, extra_body=body, **GREEDY)
        return answer.choices[0].message.content

    assert "Paris" in ask() and "Paris" not in ask(bad_words=["Paris"])
    ids = {name: tokens(client, name) for name in (" Rome", " Paris")}
    only = ask(allowed_token_ids=[ids[" Rome"][0]])
    assert set(only.split()) == {"Rome"}, only


def tokens(client, text):
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    url = str(client.base_url).removesuffix("/v1/") + "/tokenize"
    with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
        return json.load(answer)["tokens"]


def test_completions_echo_stop_and_token_ids(client, model):
    answer = client.completions.create(model=model, prompt="One, two,", echo=True, stop=["four"], **GREEDY)
    assert answer.choices[0].text.startswith("One, two,")
    assert "four" not in answer.choices[0].text
    ids = client.completions.create(model=model, prompt=[1, 2, 3], max_tokens=3, logprobs=2)
    assert ids.usage.prompt_tokens == 3
    assert len(ids.choices[0].logprobs.tokens) == ids.usage.completion_tokens


@pytest.mark.parametrize(
    ("extra", "prefill", "decode"),
    [
        ({"epsilon": 0.2}, "dense", "vattention"),
        ({"epsilon": 0.2, "delta": 0.3}, "dense", "vattention"),
        ({"gamma": 8}, "delta", "dense"),
        ({"gamma": 8, "epsilon": 0.2}, "delta", "vattention"),
        ({"attention": {"decode": {"method": "streaming_llm", "window": 16}}}, "dense", "streaming_llm"),
        ({"attention": {"prefill": {"method": "streaming_llm"}, "audit": True}}, "streaming_llm", "dense"),
        ({"vllm_xargs": {"attention_epsilon": 0.2, "attention_audit": 0.5}}, "dense", "vattention"),
    ],
)
def test_extra_body_chooses_attention(client, model, extra, prefill, decode):
    answer = client.chat.completions.create(model=model, messages=QUESTION, extra_body=extra, **GREEDY)
    report = attention(answer.usage)
    assert (report["prefill"]["method"], report["decode"]["method"]) == (prefill, decode)
    if "audit" in json.dumps(extra):
        # What is dense already is compared with nothing.
        compared = "decode" if decode != "dense" else "prefill"
        assert report[compared]["audit"]["heads"] > 0


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"epsilon": 3}, "epsilon"),
        ({"epsilonn": 0.1}, "epsilonn"),
        ({"Gamma": 8}, "Gamma"),
        ({"attn": {}}, "attn"),
        ({"extra_body": {"epsilon": 0.1}}, "extra_body"),
        ({"attention": {"decode": {"method": "vattention", "epsilon": -1}}}, "attention.decode.epsilon"),
        ({"attention": {"decode": {"method": "none"}}}, "attention.decode.method"),
        ({"attention": {"decode": {"method": "dense"}}, "epsilon": 0.1}, "epsilon"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_mistakes_are_bad_requests_that_name_the_field(client, model, extra, param):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=model, messages=QUESTION, stream=stream, extra_body=extra)
        assert error.value.param == param
        assert error.value.body["message"]


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)


def test_a_cancelled_stream_frees_the_server(client, model, address):
    stream = client.completions.create(
        model=model, prompt="Once", stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    start = time.monotonic()
    while True:
        with urllib.request.urlopen(address + "/ready") as answer:
            ready = json.load(answer)
            if (ready["waiting"], ready["running"]) == (0, 0):
                break
        assert time.monotonic() - start < 5, "the abandoned request still runs"
        time.sleep(0.05)


def test_the_async_client_and_a_queue(address, model):
    async def run():
        client = openai.AsyncOpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
        calls = [client.chat.completions.create(model=model, messages=QUESTION, **GREEDY) for _ in range(8)]
        return await asyncio.gather(*calls)

    texts = {answer.choices[0].message.content for answer in asyncio.run(run())}
    assert len(texts) == 1


def test_many_at_once_get_what_each_gets_alone(client, address, model):
    """Streams with attention of their own, prompts of every length: the tokens do not depend on who else is there."""
    methods = [
        {},
        {"epsilon": 0.2, "delta": 0.2},
        {"gamma": 16},
        {"attention": {"decode": {"method": "quest", "k": 64}}},
        {"attention": {"prefill": {"method": "streaming_llm", "window": 64}, "decode": {"method": "santa"}}},
    ]
    asked = [
        {
            "model": model,
            "messages": [{"role": "user", "content": f"Tell me about the number {n}. " + "And then? " * (n * 17 % 120)}],
            "max_tokens": 8 + n % 5 * 6,
            "temperature": 0.8,
            "seed": n,
            "extra_body": methods[n % len(methods)],
        }
        for n in range(20)
    ]
    alone = [client.chat.completions.create(**request).choices[0].message.content for request in asked]

    async def together():
        many = openai.AsyncOpenAI(base_url=address + "/v1", api_key="none", max_retries=0, timeout=120)

        async def stream(request):
            text = ""
            async for chunk in await many.chat.completions.create(**request, stream=True):
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            return text

        return await asyncio.gather(*map(stream, asked))

    assert asyncio.run(together()) == alone


def test_a_conversation_reuses_what_was_said(client, model):
    history = [{"role": "user", "content": "Count to a hundred in words. " * 60}]
    ask = {"model": model, "max_tokens": 4, "temperature": 0}
    first = client.chat.completions.create(messages=history, **ask)
    history += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "Go on."}]
    second = client.chat.completions.create(messages=history, **ask)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens - 64 - 16 and cached % 64 == 0
    sparse = client.chat.completions.create(messages=history, **ask, extra_body={"gamma": 64})
    assert sparse.usage.prompt_tokens_details.cached_tokens == 0, "another way to attend has other keys"


def test_embeddings(client, model):
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose by a quarter of a percent."]
    answer = client.embeddings.create(model=model, input=texts)
    cat, also, rates = [item.embedding for item in answer.data]
    likeness = lambda a, b: sum(x * y for x, y in zip(a, b))
    assert len(cat) == 576 and abs(likeness(cat, cat) - 1) < 1e-5
    assert likeness(cat, also) > likeness(cat, rates)
    # The client asks for base64 by itself; numbers are the same.
    plain = client.embeddings.create(model=model, input=texts[0], encoding_format="float").data[0].embedding
    assert likeness(plain, cat) > 0.999
