"""The OpenAI Python SDK against a gateway: what its users see must be what they would see of an engine.

Takes the base URLs of a gateway and of the mock worker behind it, prints a line for each check that holds, and ends
with 1 at the first that does not. Never needs anything but the package `openai`.
"""

import asyncio
import io
import json
import sys
import time
import urllib.request

import openai

GATEWAY, WORKER = sys.argv[1:3]
HELLO = [{"role": "user", "content": "hello, grüße, 你好"}]


def client(**more):
    settings = {"base_url": GATEWAY + "/v1", "api_key": "sk-client", "max_retries": 0, "timeout": 60} | more
    return openai.OpenAI(**settings)


def stats():
    with urllib.request.urlopen(WORKER + "/mock/stats") as answer:
        return json.load(answer)


def until(what, holds):
    for _ in range(200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("in vain: " + what)


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def chat(of=None, messages=HELLO, mock=None, **more):
    body = {"model": "mock", "messages": messages, "max_tokens": 5} | more
    if mock is not None:
        body["extra_body"] = {"mock": mock}
    return (of or client()).chat.completions.create(**body)


def chat_whole():
    answer = chat()
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content, answer
    assert answer.usage.completion_tokens == 5 and answer.usage.prompt_tokens > 0, answer
    assert answer._request_id, "no request id"
    sent = json.loads(stats()["last"]["body"])
    assert sent["messages"] == HELLO, sent


def chat_stream():
    whole = chat().choices[0].message.content
    stream = chat(stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole, (text, whole)
    assert chunks[-1].usage.completion_tokens == 5, chunks[-1]
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finishes == ["length"], finishes


def stream_arrives_as_it_is_made():
    begun, arrivals = time.monotonic(), []
    for chunk in chat(stream=True, mock={"gap_ms": 100}, max_tokens=10):
        if chunk.choices and chunk.choices[0].delta.content:
            arrivals.append(time.monotonic() - begun)
    assert arrivals[0] < 0.6 and arrivals[-1] > 0.85, arrivals


def streams_can_be_left():
    before = stats()["aborted"]
    stream = chat(stream=True, mock={"gap_ms": 50}, max_tokens=2000)
    next(iter(stream))
    stream.close()
    until("the worker's request ends with its client", lambda: stats()["aborted"] == before + 1)


def chat_through_helpers():
    with client().chat.completions.with_streaming_response.create(model="mock", messages=HELLO, max_tokens=3) as raw:
        assert raw.status_code == 200 and raw.headers["x-request-id"] == raw.request_id, raw.headers
        assert raw.parse().usage.completion_tokens == 3
    raw = client().chat.completions.with_raw_response.create(model="mock", messages=HELLO, n=3)
    assert len(raw.parse().choices) == 3


def completions():
    answer = client().completions.create(model="mock", prompt=["one", "two"], max_tokens=4)
    assert [c.index for c in answer.choices] == [0, 1] and answer.choices[0].text, answer
    chunks = list(client().completions.create(model="mock", prompt="one", max_tokens=4, stream=True))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == answer.choices[0].text, chunks


def embeddings():
    answer = client().embeddings.create(model="mock", input=["a", "b", "c"])
    assert [d.index for d in answer.data] == [0, 1, 2] and len(answer.data[0].embedding) == 8, answer


def responses():
    answer = client().responses.create(model="mock", input="hello", max_output_tokens=4)
    assert answer.status == "completed" and answer.output_text, answer
    events = [e.type for e in client().responses.create(model="mock", input="hello", max_output_tokens=4, stream=True)]
    assert events[0] == "response.created" and events[-1] == "response.completed", events


def stored_responses():
    answer = client().responses.create(model="mock", input="hello", max_output_tokens=4)
    assert client().responses.retrieve(answer.id).id == answer.id
    assert raises(openai.NotFoundError, lambda: client().responses.retrieve("resp_nobody")).status_code == 404


def transcriptions():
    sound = io.BytesIO(b"RIFF" + bytes(range(256)) * 2000)
    sound.name = "sound.wav"
    assert client().audio.transcriptions.create(model="mock", file=sound).text


def models():
    assert [m.id for m in client().models.list()] == ["mock"]


def errors_have_their_kind():
    error = raises(openai.NotFoundError, lambda: chat(model="nobody-serves-this"))
    assert (error.status_code, error.code) == (404, "model_not_found"), error
    assert error.request_id and error.body["message"] and error.body["type"], error
    assert error.response.headers["x-corelane-error"] == "model_not_found", error.response.headers
    error = raises(openai.BadRequestError, lambda: client().post("/chat/completions", body=[1], cast_to=object))
    assert error.code in ("invalid_json", "invalid_field"), error
    error = raises(openai.NotFoundError, lambda: client().post("/no/such/route", body={}, cast_to=object))
    assert error.code == "not_found", error
    # What a worker says of an error comes through as it came.
    kinds = {
        400: openai.BadRequestError,
        401: openai.AuthenticationError,
        403: openai.PermissionDeniedError,
        404: openai.NotFoundError,
        409: openai.ConflictError,
        422: openai.UnprocessableEntityError,
        429: openai.RateLimitError,
        500: openai.InternalServerError,
        503: openai.InternalServerError,
    }
    for status, kind in kinds.items():
        error = raises(kind, lambda: chat(mock={"status": status}))
        assert error.status_code == status and "asked to refuse" in error.message, error
        assert "x-corelane-error" not in error.response.headers, error.response.headers


def request_ids_pass():
    answer = chat(extra_headers={"x-request-id": "from-the-client"})
    assert answer._request_id == "from-the-client", answer._request_id
    assert "x-request-id: from-the-client" in stats()["last"]["head"].lower()
    error = raises(openai.NotFoundError, lambda: chat(model="nobody", extra_headers={"x-request-id": "of-an-error"}))
    assert error.request_id == "of-an-error"
    assert chat()._request_id != chat()._request_id


def headers_pass():
    chat(extra_headers={"x-custom": "kept", "traceparent": "00-1-2-01"})
    head = stats()["last"]["head"].lower()
    for line in ["x-custom: kept", "traceparent: 00-1-2-01", "authorization: bearer sk-client", "x-stainless-lang: python"]:
        assert line in head, (line, head)


def attempts(mock, **more):
    """Requests that the worker sees of one call, and the seconds that the call takes."""
    before, begun = stats()["requests"], time.monotonic()
    raises(openai.APIStatusError, lambda: chat(client(**more), mock=mock))
    return stats()["requests"] - before, time.monotonic() - begun


def retries_are_the_sdk_s():
    # The gateway passes a worker's refusal on: the SDK's own retries are not multiplied.
    assert attempts({"status": 503})[0] == 1
    quick = {"headers": [["retry-after-ms", "10"]]}
    assert attempts({"status": 503} | quick, max_retries=2)[0] == 3
    assert attempts({"status": 429} | quick, max_retries=1)[0] == 2
    assert attempts({"status": 400}, max_retries=2)[0] == 1
    never = {"headers": [["x-should-retry", "false"]]}
    assert attempts({"status": 500} | never, max_retries=2)[0] == 1
    asked = {"headers": [["x-should-retry", "true"], ["retry-after-ms", "10"]]}
    assert attempts({"status": 400} | asked, max_retries=2)[0] == 3
    seen, took = attempts({"status": 503, "headers": [["retry-after", "1"]]}, max_retries=1)
    assert seen == 2 and 0.9 < took < 4, (seen, took)
    assert "x-stainless-retry-count: 1" in stats()["last"]["head"].lower()


def broken_streams_raise():
    def read():
        return list(chat(stream=True, max_tokens=20, mock={"reset_after_events": 3, "gap_ms": 5}))

    error = raises(Exception, read)
    assert isinstance(error, openai.APIError) or type(error).__module__.startswith("http"), repr(error)


def timeouts_raise():
    before = stats()["aborted"]
    raises(openai.APITimeoutError, lambda: chat(client(timeout=0.3), mock={"hang": True}))
    until("the worker's request ends with its client", lambda: stats()["aborted"] == before + 1)


def long_messages():
    text = "lane, \"core\"\n\\ é 你 " * 1_000_000
    assert len(text.encode()) > 20_000_000
    for stream in [False, True]:
        answer = chat(messages=[{"role": "user", "content": text}], stream=stream)
        assert not stream or len(list(answer)) > 3
        last = stats()["last"]
        assert last["body_length"] > 20_000_000, last["body_length"]
    echo = client().chat.completions.with_raw_response.create(
        model="mock", messages=[{"role": "user", "content": text}], extra_body={"mock": {"echo_body": True}}
    )
    assert json.loads(echo.http_response.content)["messages"][0]["content"] == text


async def many_streams():
    async with openai.AsyncOpenAI(base_url=GATEWAY + "/v1", api_key="sk-client", max_retries=0, timeout=60) as many:

        async def one(number):
            stream = await many.chat.completions.create(
                model="mock",
                messages=[{"role": "user", "content": f"stream {number}"}],
                max_tokens=20,
                stream=True,
                extra_body={"mock": {"gap_ms": 20, "text": f"[{number}]"}},
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

        texts = await asyncio.gather(*(one(number) for number in range(50)))
        for number, text in enumerate(texts):
            assert text == f"[{number}]" * 20, (number, text)
    until("every stream has ended", lambda: stats()["active"] == 0)
    assert stats()["peak"] >= 25, stats()["peak"]


CHECKS = [
    chat_whole,
    chat_stream,
    stream_arrives_as_it_is_made,
    streams_can_be_left,
    chat_through_helpers,
    completions,
    embeddings,
    responses,
    stored_responses,
    transcriptions,
    models,
    errors_have_their_kind,
    request_ids_pass,
    headers_pass,
    retries_are_the_sdk_s,
    broken_streams_raise,
    timeouts_raise,
    long_messages,
    many_streams,
]

print("openai", openai.__version__, flush=True)
for check in CHECKS:
    print(check.__name__, end=" ", flush=True)
    begun = time.monotonic()
    result = check()
    if asyncio.iscoroutine(result):
        asyncio.run(result)
    print(f"holds ({time.monotonic() - begun:.2f} s)", flush=True)
print("all hold", flush=True)
