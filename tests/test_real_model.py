"""The real model, where `fetch-model` has put it: weights, tokenizer, greedy text; and its referee, HF transformers."""

import pytest
import torch

from servelab import fetch
from servelab.llm import LLM, LLMConfig, smollm
from servelab.llm.generate import greedy
from servelab.llm.kv import ContiguousKV
from servelab.llm.tokenizer import SYSTEM

needs_model = pytest.mark.skipif(bool(fetch.problem()), reason=f"the real model: {fetch.problem()}; {fetch.MEND}")

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that reverses a list.",
    "What is 12 + 30?",
    "Name three colours.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "What is the boiling point of water in degrees Fahrenheit?",
    "Write a short poem about the sea.",
    "How many days are in a leap year?",
    "What is a page table?",
    "List the planets of the solar system.",
    "Why do leaves change colour in autumn?",
    "Summarise: The cat sat on the mat. The dog barked. The cat ran away.",
    "What does HTTP stand for?",
    "Count from 1 to 10.",
    "Describe a sunset in one sentence.",
    "What is the opposite of hot?",
    "Is 17 a prime number?",
    "Grüße aus Köln! Was ist das?",
    "def fibonacci(n):",
    "What is a KV cache used for?",
    "Tell me a joke.",
)
TEXTS = (
    *PROMPTS,
    "",
    "  two  blanks\n\n\tand a tab ",
    "1234567 3.14 2024-11-05",
    "naïve café 中文 日本語 \U0001f600\U0001f44d\U0001f3fd \u200b",
    "for (int i = 0; i < n; ++i) { a[i] += 1; }",
    "It's we'll they've I'M",
)


def chat(prompt):
    return [{"role": "user", "content": prompt}]


@pytest.fixture(scope="module")
def model():
    return LLM(*smollm.load())


@pytest.fixture(scope="module")
def tokenizer():
    return smollm.tokenizer()


def test_without_it_the_mend_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SERVELAB_CACHE", str(tmp_path))
    with pytest.raises(fetch.CourseError, match="the real model: it is not here") as caught:
        smollm.load()
    assert "fetch-model" in caught.value.mend


def test_rows_of_q_and_k():
    """Pairs that are neighbours in a head come to lie half a head apart."""
    rows = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 10, 14, 11, 15, 12, 16, 13, 17]).reshape(16, 1)
    found = smollm.rotate_half_rows(rows, 2).flatten().tolist()
    assert found == [*range(8), *range(10, 18)]


@needs_model
def test_dimensions(model):
    assert model.config == LLMConfig(
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rope_theta=100_000.0,
        rms_norm_eps=pytest.approx(1e-5),
        max_model_len=8192,
        eos_token_id=2,
    )
    assert {name: tuple(weight.shape) for name, weight in model.weights.items()} == model.config.shapes()
    assert sum(weight.numel() for weight in model.weights.values()) == 134_515_008


@needs_model
def test_it_answers(model, tokenizer):
    prompt = tokenizer.apply_chat_template(chat("What is the capital of France?"))
    answer = list(greedy(model, prompt, 20))
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer) == "The capital of France is Paris."


@needs_model
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    stream = tokenizer.stream()
    assert "".join([*map(stream.push, tokens), stream.finish()]) == text


@needs_model
def test_bytes_that_the_vocabulary_lacks_are_left_out(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"


@needs_model
def test_chat_template_is_the_files(tokenizer):
    """Rendered by the template in the file, then cut at its control tokens."""
    import jinja2

    template = jinja2.Template(smollm._field("tokenizer.chat_template"))
    system = {"role": "system", "content": "Be brief."}
    for messages in (chat("Hi 12"), [system, *chat("Hi"), {"role": "assistant", "content": "Hello!"}, *chat(" ")]):
        text, tokens = template.render(messages=messages, add_generation_prompt=True), []
        assert (SYSTEM in text) == (messages[0] is not system)
        for turn in text.split("<|im_start|>")[1:]:
            body, end, rest = turn.partition("<|im_end|>")
            tokens += [1, *tokenizer.encode(body), *([2] if end else []), *tokenizer.encode(rest)]
        assert tokenizer.apply_chat_template(messages) == tokens


@pytest.fixture(scope="module")
def referee():
    """HF's model and tokenizer, out of the same file."""
    transformers = pytest.importorskip("transformers", reason="a referee for development, not installed here")
    place, name = str(fetch.model_path().parent), fetch.SMOLLM.model.name
    model = transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)


@needs_model
def test_tokens_are_those_of_transformers(tokenizer, referee):
    _, theirs = referee
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text), text
    for prompt in PROMPTS:
        rendered = theirs.apply_chat_template(chat(prompt), add_generation_prompt=True, return_dict=True)
        assert tokenizer.apply_chat_template(chat(prompt)) == rendered["input_ids"]


@needs_model
@torch.no_grad()
def test_logits_and_greedy_text_are_those_of_transformers(model, tokenizer, referee):
    theirs, _ = referee
    worst = 0.0
    for prompt in PROMPTS:
        tokens = torch.tensor(tokenizer.apply_chat_template(chat(prompt)))
        wanted = theirs.generate(tokens[None], max_new_tokens=32, do_sample=False)[0]
        assert list(greedy(model, tokens.tolist(), 32)) == wanted[len(tokens) :].tolist(), prompt
        hidden = model.forward(wanted, torch.arange(len(wanted)), ContiguousKV())
        worst = max(worst, (model.logits(hidden) - theirs(wanted[None]).logits[0]).abs().max().item())
    print(f"largest difference of a logit: {worst:.2g}, over {len(PROMPTS)} conversations")
    assert worst < 1e-3
