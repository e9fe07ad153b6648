"""The endpoint, as the public `openai` client and other, worse clients see it."""

import asyncio
import http.client
import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servelab.errors import CourseError
from servelab.llm import LLM, LLMConfig
from servelab.llm.api import serve_api
from servelab.llm.api import server as server_module
from servelab.llm.api.answer import Answer
from servelab.llm.engine import NewToken
from servelab.llm.generate import greedy
from servelab.llm.kv import Pages
from servelab.llm.tokenizer import ByteTokenizer
from servelab.serving import PagedKV, SchedulerConfig

LONG = 1 << 20  # tokens: more than any test waits for
SOON = 30  # seconds after which a thread that is waited for counts as lost
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


class Scripted:
    """An engine without a model: every answer is the bytes of a text, over and over, one a step."""

    def __init__(self, text="abcdefghij", pace=0.0):
        self.text, self.pace = text.encode(), pace
        self.live, self.steps, self.asked = {}, 0, []
        self.added, self.aborted = threading.Event(), threading.Event()

    @property
    def num_unfinished(self):
        return len(self.live)

    def add(self, request, prompt):
        assert request.prompt_tokens == len(prompt)
        self.live[request.id] = [request.max_tokens, 0]
        self.asked.append((request, list(prompt)))
        self.added.set()

    def abort(self, id):
        if self.live.pop(id, None):
            self.aborted.set()

    def step(self):
        self.steps += 1
        time.sleep(self.pace)  # lets other threads run while an answer without end goes on
        return [self.next_token(id) for id in list(self.live)]

    def next_token(self, id):
        most, done = self.live[id]
        self.live[id][1] += 1
        token = self.text[done % len(self.text)]
        finished = done + 1 == most or token == ByteTokenizer.eos_token_id
        if finished:
            del self.live[id]
        return NewToken(id, token, finished)


class Spelled(ByteTokenizer):
    """Decodes each token into its number, so that equal texts are equal tokens."""

    pieces = (b"", *(b"%02x " % token for token in range(1, 256)))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def serve(request):
    """Starts servers, and closes them after the test."""

    def start(engine, tokenizer=None, **options):
        server = serve_api(engine, tokenizer or ByteTokenizer(), **options)
        request.addfinalizer(server.close)
        return server

    return start


@pytest.fixture(scope="module")
def one_for_all():
    engine = Scripted()
    with serve_api(engine, ByteTokenizer()) as server:
        yield server, engine


@pytest.fixture
def scripted(one_for_all):
    """Sets the text of a server that many tests share; gives the server and its engine, which has no requests."""

    def restart(text="abcdefghij"):
        server, engine = one_for_all
        engine.text, engine.asked = text.encode(), []
        engine.aborted.clear()
        return server, engine

    return restart


def client_of(server, kind=openai.OpenAI):
    return kind(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=SOON)


def exchange(server, path, body, method="POST"):
    """Status and JSON of one exchange; a body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SOON)
    connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body))
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def faults(caplog):
    """What the server has logged; it logs nothing else."""
    return [record for record in caplog.records if record.name.startswith(("uvicorn", "servelab"))]


def events(server, path, body):
    """The data of each event of a stream, as sent."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SOON)
    connection.request("POST", path, json.dumps(body | {"stream": True}))
    response = connection.getresponse()
    assert (response.status, response.headers.get_content_type()) == (200, "text/event-stream")
    blocks = response.read().decode().split("\n\n")
    connection.close()
    assert blocks.pop() == "" and all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


# what a client may ask for, and gets


def test_models(serve):
    client = client_of(serve(Scripted(), model="org/tiny", max_model_len=99))
    (card,) = client.models.list().data
    assert (card.id, card.object, card.max_model_len) == ("org/tiny", "model", 99)
    assert client.models.retrieve("org/tiny") == card
    with pytest.raises(openai.NotFoundError, match="no model") as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_completion(scripted):
    server, engine = scripted()
    client = client_of(server)
    answer = client.completions.create(model="tiny", prompt="hi", max_tokens=12)
    assert (answer.object, answer.model, answer.choices[0].index) == ("text_completion", "tiny", 0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcdefghijab", "length")
    assert answer.usage.to_dict() == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}
    ((request, prompt),) = engine.asked
    assert (request.id, request.max_tokens, prompt) == (answer.id, 12, list(b"hi"))


def test_chat(scripted):
    server, engine = scripted("no\0")
    client = client_of(server)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}]
    answer = client.chat.completions.create(model="tiny", messages=messages)
    assert (answer.object, answer.choices[0].message.role) == ("chat.completion", "assistant")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("no", "stop")
    prompt = ByteTokenizer().apply_chat_template(messages)
    assert engine.asked[0][1] == prompt
    assert answer.usage.to_dict() == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 3,  # the end-of-sequence token is one of the answer
        "total_tokens": len(prompt) + 3,
    }


def test_longest_answer_of_a_chat(scripted):
    server, engine = scripted("\0")
    for asked in ({}, {"max_tokens": 5}, {"max_completion_tokens": 6}, {"max_tokens": None, "stop": []}):
        assert exchange(server, CHAT, {"model": "tiny", "messages": HELLO} | asked)[0] == 200
    assert [request.max_tokens for request, _ in engine.asked] == [1024 - 7, 5, 6, 1024 - 7]


def test_longest_answer_of_a_completion(serve):
    engine = Scripted("\0")
    server = serve(engine, max_model_len=20)
    for prompt in ("abc", "a" * 12):
        assert exchange(server, COMPLETIONS, {"model": "tiny", "prompt": prompt})[0] == 200
    assert [request.max_tokens for request, _ in engine.asked] == [16, 8]


def test_prompts_and_messages_in_all_their_forms(scripted):
    server, engine = scripted("\0")
    for prompt in ("hi", ["hi"], [104, 105], [[104, 105]]):
        assert exchange(server, COMPLETIONS, {"model": "tiny", "prompt": prompt})[0] == 200
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    message = {"role": "user", "content": parts, "name": "eve"}
    assert exchange(server, CHAT, {"model": "tiny", "messages": [message]})[0] == 200
    assert [bytes(prompt) for _, prompt in engine.asked] == [b"hi"] * 4 + [b"hello\n\n"]


def test_what_makes_no_difference_is_accepted(scripted):
    body = {"model": "tiny", "prompt": "hi", "temperature": 0.0, "top_p": 0.5, "seed": 1, "user": "eve", "n": 1}
    body |= {"stop": None, "logprobs": None, "echo": False, "best_of": 1, "logit_bias": {}, "presence_penalty": 0}
    assert exchange(scripted()[0], COMPLETIONS, body)[0] == 200


def test_stream_of_a_completion(scripted):
    client = client_of(scripted("né\0")[0])
    chunks = list(client.completions.create(model="tiny", prompt="hi", stream=True))
    assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks] == [
        ("n", None),
        ("é", None),
        ("", "stop"),
    ]
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].usage is None


def test_stream_of_a_chat(scripted):
    client = client_of(scripted("ok")[0])
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
    *chunks, last = client.chat.completions.create(model="tiny", messages=HELLO, **options)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "o", "k", "o"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]
    assert all(chunk.usage is None for chunk in chunks) and last.choices == []
    assert last.usage.to_dict() == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def test_stream_as_it_is_sent(scripted):
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
    *parts, done = events(scripted()[0], COMPLETIONS, body)
    assert done == "[DONE]"
    assert [json.loads(part)["choices"][0]["text"] for part in parts] == ["a", "b"]
    assert not any("usage" in json.loads(part) for part in parts)


@pytest.mark.parametrize("stop", ["\n\n", ["never", "\n\n"]])
def test_stop_string(scripted, stop):
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 1000, "stop": stop}
    server, engine = scripted("one\ntwo\n\nthree")
    client = client_of(server)
    answer = client.chat.completions.create(**asked)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one\ntwo", "stop")
    assert answer.usage.completion_tokens == len("one\ntwo\n\n")
    assert engine.aborted.is_set() and not engine.live  # freed before the client had its answer
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one\ntwo"
    assert chunks[-1].choices[0].finish_reason == "stop"


def cut(text, stops):
    """The text before the stop string that is complete first."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


@given(st.text("ab€", min_size=1), st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3), st.data())
def test_answer_stops_wherever_tokens_begin_and_end(text, stops, data):
    pieces = text.encode()
    bounds = sorted({0, len(pieces), *data.draw(st.lists(st.integers(0, len(pieces))))})

    class Chopped(ByteTokenizer):
        pieces = tuple(text.encode()[a:b] for a, b in itertools.pairwise(bounds))
        eos_token_id = -1

    answer, deltas = Answer(Chopped(), stops), []
    for token in range(len(bounds) - 1):
        deltas.append(answer.push(token, finished=token == len(bounds) - 2))
        if deltas[-1].finish_reason:
            break
    assert "".join(delta.text for delta in deltas) == cut(text, stops)
    assert deltas[-1].finish_reason == ("stop" if cut(text, stops) != text else "length")


def test_answer_that_ends_within_a_character():
    answer = Answer(ByteTokenizer())
    assert answer.push("é".encode()[0], finished=True).text == "\ufffd"


# what is refused

WRONG = [
    (COMPLETIONS, {}, "prompt", "missing_required_parameter"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [True]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [256]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": []}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "echo": True}, "echo", "unsupported_value"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 0}, "logprobs", "unsupported_value"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of", "unsupported_value"),
    (COMPLETIONS, {"prompt": "a", "suffix": "z"}, "suffix", "unsupported_value"),
    (COMPLETIONS, {"prompt": "a", "messages": HELLO}, "messages", "unknown_parameter"),
    (COMPLETIONS, {"prompt": "a", "max_completion_tokens": 1}, "max_completion_tokens", "unknown_parameter"),
    (CHAT, {}, "messages", "missing_required_parameter"),
    (CHAT, {"messages": "hello"}, "messages", "invalid_type"),
    (CHAT, {"messages": []}, "messages", "invalid_value"),
    (CHAT, {"messages": ["hello"]}, "messages[0]", "invalid_type"),
    (CHAT, {"messages": [*HELLO, {"content": "a"}]}, "messages[1].role", "missing_required_parameter"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing_required_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content.type", None),
    (CHAT, {"messages": HELLO, "logprobs": True}, "logprobs", "unsupported_value"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "unsupported_value"),
    (CHAT, {"messages": HELLO, "tools": [{}]}, "tools", "unsupported_value"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
    (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "invalid_value"),
    (CHAT, {"messages": HELLO, "temperature": 1}, "temperature", "unsupported_value"),
    (CHAT, {"messages": HELLO, "temperature": False}, "temperature", "unsupported_value"),
    (CHAT, {"messages": HELLO, "temperature": float("nan")}, "temperature", "unsupported_value"),
    (CHAT, {"messages": HELLO, "n": 2}, "n", "unsupported_value"),
    (CHAT, {"messages": HELLO, "n": True}, "n", "unsupported_value"),
    (CHAT, {"messages": HELLO, "frequency_penalty": 0.5}, "frequency_penalty", "unsupported_value"),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 1}}, "logit_bias", "unsupported_value"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT, {"messages": HELLO, "max_tokens": 2.5}, "max_tokens", "invalid_type"),
    (CHAT, {"messages": HELLO, "max_tokens": "5"}, "max_tokens", "invalid_type"),
    (CHAT, {"messages": HELLO, "max_tokens": True}, "max_tokens", "invalid_type"),
    (CHAT, {"messages": HELLO, "stop": ""}, "stop", "invalid_value"),
    (CHAT, {"messages": HELLO, "stop": ["a"] * 5}, "stop", "invalid_value"),
    (CHAT, {"messages": HELLO, "stop": "a" * 257}, "stop", "invalid_value"),
    (CHAT, {"messages": HELLO, "stop": [5]}, "stop", "invalid_type"),
    (CHAT, {"messages": HELLO, "stream": "yes"}, "stream", "invalid_type"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (CHAT, {"messages": HELLO, "stream": True, "stream_options": []}, "stream_options", "invalid_type"),
    (CHAT, {"messages": HELLO, "stream": True, "stream_options": {"a": 1}}, "stream_options.a", "unknown_parameter"),
    (CHAT, {"messages": HELLO, "top_k": 5}, "top_k", "unknown_parameter"),
    (CHAT, {"messages": HELLO, "top_p": "a"}, "top_p", "invalid_type"),
]


def test_wrong_fields(scripted):
    server, engine = scripted()
    for path, fields, param, code in WRONG:
        status, answer = exchange(server, path, {"model": "tiny"} | fields)
        error = answer["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), fields
        assert error["code"] == (code or "unsupported_value"), fields
        assert param in error["message"]
    assert engine.asked == []


def test_wrong_models(scripted):
    server, _ = scripted()
    for fields, status, code in (
        ({}, 400, "missing_required_parameter"),
        ({"model": 5}, 400, "invalid_type"),
        ({"model": "gpt"}, 404, "model_not_found"),
        ({"model": "\ud800"}, 404, "model_not_found"),
    ):
        found, answer = exchange(server, CHAT, {"messages": HELLO} | fields)
        assert (found, answer["error"]["param"], answer["error"]["code"]) == (status, "model", code)
    with pytest.raises(openai.NotFoundError):
        client_of(server).completions.create(model="gpt", prompt="a")


def test_malformed_bodies(scripted):
    server, _ = scripted()
    broken = (None, b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"model": 1' + b"0" * 5000 + b"}")
    for body in (*broken, b"[]", b'"a"', b"null"):
        status, answer = exchange(server, CHAT, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert "JSON" in answer["error"]["message"]


def test_wrong_addresses(scripted):
    server, _ = scripted()
    for method, path, status in (("GET", "/", 404), ("POST", "/v1/embeddings", 404), ("GET", CHAT, 405)):
        found, answer = exchange(server, path, None, method)
        assert found == status and path in answer["error"]["message"]


def test_client_raises_what_the_error_says(scripted):
    client = client_of(scripted()[0])
    with pytest.raises(openai.BadRequestError, match="greedy") as caught:
        client.completions.create(model="tiny", prompt="a", temperature=0.7)
    assert (caught.value.param, caught.value.code) == ("temperature", "unsupported_value")


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_prompts(serve, stream):
    client = client_of(serve(engine := Scripted(), max_model_len=10))
    for prompt, max_tokens, param in (("a" * 11, None, "prompt"), ("a" * 10, 1, "prompt"), ("a" * 8, 3, "max_tokens")):
        with pytest.raises(openai.BadRequestError, match="the context holds 10 tokens") as caught:
            client.completions.create(model="tiny", prompt=prompt, max_tokens=max_tokens, stream=stream)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
    assert engine.asked == []
    assert client.completions.create(model="tiny", prompt="a" * 8, max_tokens=2).usage.total_tokens == 10


class Small(Scripted):
    def add(self, request, prompt):
        if len(prompt) > 4:
            raise ValueError("more blocks than there are")
        super().add(request, prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses(serve, stream):
    """Its refusal concerns one request; even of a stream it has a status of its own."""
    server = serve(Small())
    client = client_of(server)
    with pytest.raises(openai.BadRequestError, match="can never run: more blocks") as caught:
        client.completions.create(model="tiny", prompt="hello", stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert client.completions.create(model="tiny", prompt="hi", max_tokens=1).choices[0].text == "a"
    assert server.error is None


def test_large_bodies(serve):
    server = serve(Scripted(), max_model_len=LONG)
    with socket.create_connection(("127.0.0.1", server.port), timeout=SOON) as raw:
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {5 << 20}\r\n\r\n".encode())
        raw.sendall(b" " * (4 << 20) + b" ")
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")


# the engine of the course behind it


def tiny_model():
    """Random weights, in fp64, so that no near-tie decides."""
    config = LLMConfig(256, 32, 2, 4, 2, 8, 64)
    draw = torch.Generator().manual_seed(5)
    weights = {
        name: torch.ones(shape, dtype=torch.float64)
        if name.endswith("norm")
        else torch.randn(shape, generator=draw, dtype=torch.float64) * 0.4
        for name, shape in config.shapes().items()
    }
    return LLM(config, weights)


def real_engine(num_blocks, pace=0.0):
    """The reference's engine with little memory: requests queue, prompts are chunked, some are preempted."""
    from servelab.reference import capstone, continuous_batching, paged_kv

    class Watched(capstone.Engine):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.steps, self.aborted = 0, threading.Event()

        def step(self):
            self.steps += 1
            time.sleep(pace)
            return super().step()

        def abort(self, id):
            super().abort(id)
            self.aborted.set()

    model, kv = tiny_model(), PagedKV(paged_kv.BlockAllocator(num_blocks, block_size=4))
    scheduler = continuous_batching.ChunkedScheduler(SchedulerConfig(8, 24, eos_token_id=0), kv)
    return Watched(model, scheduler, kv, Pages.of(model, num_blocks, 4, paged_kv))


def test_32_at_the_same_time(serve):
    """Streams and whole answers, completions and chats: each gets the tokens of the plain loop."""
    engine, tokenizer = real_engine(num_blocks=30), Spelled()
    server = serve(engine, tokenizer)

    async def ask(client, number):
        text, most, stream = "request " * (number % 4) + str(number), 6 + number % 11, number % 3 > 0
        if number % 2:
            asked = {"messages": [{"role": "user", "content": text}]}
            prompt = tokenizer.apply_chat_template(asked["messages"])
            answer = await client.chat.completions.create(model="tiny", **asked, max_tokens=most, stream=stream)
            parts = [chunk.choices[0].delta.content or "" async for chunk in answer] if stream else None
            found = "".join(parts) if stream else answer.choices[0].message.content
        else:
            prompt = tokenizer.encode(text)
            answer = await client.completions.create(model="tiny", prompt=text, max_tokens=most, stream=stream)
            parts = [chunk.choices[0].text async for chunk in answer] if stream else None
            found = "".join(parts) if stream else answer.choices[0].text
        return found, tokenizer.decode(greedy(engine.model, prompt, most))

    async def all_of_them():
        async with client_of(server, openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(32)))

    answers = asyncio.run(all_of_them())
    assert [found for found, _ in answers] == [expected for _, expected in answers]
    assert len(set(answers)) > 16
    assert engine.kv.num_free == engine.kv.num_blocks and engine.num_unfinished == 0
    assert engine.steps < sum(len(expected.split()) for _, expected in answers)  # they did share steps


def test_a_client_that_hangs_up_frees_its_kv(serve):
    engine = real_engine(num_blocks=260, pace=0.001)
    client = client_of(serve(engine, Spelled()))
    with client.completions.create(model="tiny", prompt="hi", max_tokens=1000, stream=True) as stream:
        next(stream)
        assert engine.kv.num_free < engine.kv.num_blocks
    assert engine.aborted.wait(SOON)
    expected = Spelled().decode(greedy(engine.model, b"next", 3))
    assert client.completions.create(model="tiny", prompt="next", max_tokens=3).choices[0].text == expected
    assert engine.kv.num_free == engine.kv.num_blocks and engine.num_unfinished == 0


def test_the_engine_rests_when_there_is_nothing_to_do(serve):
    server = serve(engine := Scripted())
    client = client_of(server)
    for steps in (4, 8):
        client.completions.create(model="tiny", prompt="a", max_tokens=4)
        client.models.list()
        assert engine.steps == steps
    server.close()
    assert engine.steps == 8


# clients that go, servers that go, engines that fail


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_before_its_first_token(serve, stream):
    class Silent(Scripted):
        def step(self):
            time.sleep(0.001)
            return []

    server = serve(engine := Silent(), max_model_len=LONG + 10)
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", COMPLETIONS, json.dumps({"model": "tiny", "prompt": "a" * LONG, "stream": stream}))
    assert engine.added.wait(SOON)
    connection.close()
    assert engine.aborted.wait(SOON)
    assert server.error is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_in_the_middle(serve, caplog, stream):
    server = serve(engine := Scripted(pace=0.001), max_model_len=LONG + 10)
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {"model": "tiny", "prompt": "hi", "max_tokens": LONG, "stream": stream}
    connection.request("POST", COMPLETIONS, json.dumps(body))
    if stream:
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        response.close()
    assert engine.added.wait(SOON)
    connection.close()
    assert engine.aborted.wait(SOON)
    server.close()
    assert not faults(caplog)


def test_a_client_that_hangs_up_within_its_request(serve, caplog):
    server = serve(engine := Scripted())
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n".encode() + b'{"model"')
    assert exchange(server, COMPLETIONS, {"model": "tiny", "prompt": "a", "max_tokens": 1})[0] == 200
    server.close()
    assert len(engine.asked) == 1 and not faults(caplog)


def since(before):
    """Threads that run now and did not run before."""
    return [thread for thread in threading.enumerate() if thread not in before]


def test_shutdown_in_mid_stream(serve, caplog):
    """Streams end with an error, not as if they were complete; whoever waits gets an error; nothing is left."""
    before = threading.enumerate()
    server = serve(engine := Scripted(pace=0.001), max_model_len=LONG + 10)
    client, begun = client_of(server), threading.Barrier(5)

    def read_stream():
        with pytest.raises(openai.APIError, match="shuts down"):
            for number, _ in enumerate(client.completions.create(**asked, stream=True)):
                if number == 3:
                    begun.wait(SOON)

    def read_whole():
        begun.wait(SOON)
        with pytest.raises(openai.APIStatusError, match="shuts down") as caught:
            client.completions.create(**asked)
        assert caught.value.status_code == 503

    asked = {"model": "tiny", "prompt": "hi", "max_tokens": LONG}
    with ThreadPoolExecutor() as pool:
        readers = [pool.submit(read_stream) for _ in range(3)] + [pool.submit(read_whole)]
        begun.wait(SOON)
        while len(engine.asked) < 4:
            time.sleep(0.001)
        server.close()
        for reader in readers:
            reader.result(SOON)
    assert engine.live == {} and since(before) == [] and not faults(caplog)
    with serve_api(Scripted(), ByteTokenizer(), port=server.port) as another:
        assert client_of(another).models.list().data
    server.close()  # once more is no harm
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_shutdown_right_after_the_start():
    before = threading.enumerate()
    for _ in range(3):
        serve_api(Scripted(), ByteTokenizer()).close()
    assert since(before) == []


def test_shutdown_with_clients_that_do_nothing(serve, monkeypatch):
    """One has only connected, one has sent half a request, one does not read its answer."""
    before = threading.enumerate()
    monkeypatch.setattr(server_module, "GRACE", 0.5)

    class Wordy(ByteTokenizer):
        pieces = (b"", *(bytes([byte]) * 100_000 for byte in range(1, 256)))

    server = serve(engine := Scripted(pace=0.001), Wordy(), max_model_len=LONG + 10)
    idle, half, deaf = (socket.create_connection(("127.0.0.1", server.port)) for _ in range(3))
    half.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n".encode() + b"{")
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": LONG, "stream": True}).encode()
    deaf.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    assert engine.added.wait(SOON)
    server.close()
    assert since(before) == []
    for client in (idle, half, deaf):
        client.close()


def test_shutdown_with_requests_that_the_engine_has_not_seen(serve, monkeypatch):
    """While a step runs, one comes before the order to close and one behind it."""
    monkeypatch.setattr(server_module, "GRACE", SOON)
    go_on = threading.Event()

    class Slow(Scripted):
        def step(self):
            go_on.wait(SOON)
            return super().step()

    server = serve(engine := Slow())

    def queued(n):
        while server._worker._inbox.qsize() < n:
            time.sleep(0.001)

    asked = (exchange, server, COMPLETIONS, {"model": "tiny", "prompt": "a"})
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(*asked)]
        assert engine.added.wait(SOON)
        for number, work in enumerate([asked, (server.close,), asked]):
            answers.append(pool.submit(*work))
            queued(number + 1)
        go_on.set()
        assert answers.pop(2).result(SOON) is None
        assert [answer.result(SOON)[0] for answer in answers] == [503] * 3
    assert engine.live == {}


def test_shutdown_while_a_step_hangs(serve, monkeypatch, caplog):
    before = threading.enumerate()
    monkeypatch.setattr(server_module, "GRACE", 0.3)
    go_on = threading.Event()

    class Hanging(Scripted):
        def step(self):
            go_on.wait()
            return super().step()

    server = serve(engine := Hanging())
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SOON)
    connection.request("POST", COMPLETIONS, json.dumps({"model": "tiny", "prompt": "a"}))
    assert engine.added.wait(SOON)
    server.close()
    assert "A step of the engine takes more than" in caplog.text
    assert [thread.name for thread in since(before)] == ["servelab engine"]
    connection.close()
    go_on.set()
    (left,) = since(before) or [None]
    if left:
        left.join(SOON)
    assert since(before) == []


class Failing(Scripted):
    """Fails in the step after ``good`` ones, and does not get up again."""

    def __init__(self, good):
        super().__init__()
        self.good = good

    def step(self):
        if self.steps >= self.good:
            raise KeyError("slot 7")
        return super().step()

    def abort(self, id):
        raise KeyError("slot 8")


def test_an_engine_that_fails(serve, caplog):
    server = serve(Failing(good=2))
    client = client_of(server)
    asked = {"model": "tiny", "prompt": "a"}
    assert client.completions.create(**asked, max_tokens=2).choices[0].text == "ab"
    assert server.error is None
    for _ in range(2):  # the request concerned, and every later one
        with pytest.raises(openai.InternalServerError, match="the engine failed: KeyError: 'slot 7'") as caught:
            client.completions.create(**asked, max_tokens=3)
        assert caught.value.code == "engine_failed"
    assert isinstance(server.error, KeyError)
    assert "slot 7" in caplog.text and "Traceback" in caplog.text
    assert client.models.list().data


def test_an_engine_that_fails_in_mid_stream(serve):
    stream = client_of(serve(Failing(good=2))).completions.create(model="tiny", prompt="a", stream=True)
    assert [next(stream).choices[0].text for _ in range(2)] == ["a", "b"]
    with pytest.raises(openai.APIError, match="slot 7"):
        next(stream)


def test_an_engine_that_fails_when_asked(serve):
    class Unwritten(Scripted):
        def add(self, request, prompt):
            raise NotImplementedError

    status, answer = exchange(serve(Unwritten()), COMPLETIONS, {"model": "tiny", "prompt": "a"})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "NotImplementedError" in answer["error"]["message"]


def test_an_engine_that_forgets_a_request(serve):
    """Nobody waits for ever for an answer that does not come."""

    class Forgetful(Scripted):
        def step(self):
            self.steps += 1
            return []

    status, answer = exchange(serve(engine := Forgetful()), COMPLETIONS, {"model": "tiny", "prompt": "abcd"})
    assert status == 500 and "5 steps gave no token" in answer["error"]["message"]
    assert engine.steps == 5 and engine.aborted.is_set()


def test_an_engine_with_strange_tokens(serve):
    class Strange(Scripted):
        def step(self):
            extra = [NewToken("nobody", 1), *(NewToken(id, 999) for id in self.live)]
            return extra

    status, answer = exchange(serve(Strange()), COMPLETIONS, {"model": "tiny", "prompt": "a"})
    assert status == 500 and "IndexError" in answer["error"]["message"]


def test_a_fault_of_the_server(serve, caplog):
    class Broken(ByteTokenizer):
        def encode(self, text):
            raise OSError("no vocabulary")

    server = serve(Scripted(), Broken())
    status, answer = exchange(server, COMPLETIONS, {"model": "tiny", "prompt": "a"})
    assert status == 500 and "no vocabulary" in answer["error"]["message"]
    server.close()
    assert "no vocabulary" in caplog.text


def test_a_port_that_is_taken(serve):
    server = serve(Scripted())
    with pytest.raises(CourseError, match=f"port {server.port}"):
        serve_api(Scripted(), ByteTokenizer(), port=server.port)
