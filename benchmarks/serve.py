"""The course's engine on the real model: against HF transformers, and against what this machine could do at best.

    python benchmarks/serve.py [--workloads w16 w32] [--repeats 3] [--only HF] [--threads 2] [--device cpu] [--json]

Serves the workloads of data/workloads.json with SmolLM2-135M-Instruct (`python3 course.py fetch-model`), on a CPU in
float32 and with `--device cuda` in bfloat16 (where near-ties let answers differ): the same prompts, greedy, every
answer with the length that the workload says. The course's engine runs with the fast parts (`servelab.llm.fast_model`,
`fast_attention`) and with the readable ones. HF transformers is no dependency of the course; its rows need it in a
folder of its own:

    python -m pip install --target hf transformers==5.24.0
    PYTHONPATH=hf python benchmarks/serve.py

Let nothing else run: torch's threads wait awake for one another, and a busy neighbour stalls them all.

All systems run once in each repeat, one behind another; ratios are taken within a repeat, and medians over repeats are
printed. The limit of a step is the larger of two times: to read the weights and the KV of its contexts at the memory
bandwidth, and to do its arithmetic at the rate of a large matrix product; both rates are measured before each repeat,
and the best counts. HF's continuous batching shares the full blocks of a common prefix (its default), the course's
engine does not. Targets, on w32: 3 times HF static, 1.9 times HF continuous batching; a paged step of at most 1.15
contiguous ones.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn.functional import scaled_dot_product_attention

from servelab.errors import CourseError
from servelab.llm import LLM, LLMConfig, smollm
from servelab.llm.engine import WatchedScheduler, Workload, serve, workload
from servelab.llm.fast_attention import FastPages, fast_pages
from servelab.llm.fast_model import FastLLM
from servelab.llm.kv import Pages
from servelab.llm.model import Weights
from servelab.reference import capstone, continuous_batching, paged_kv
from servelab.serving import FlatBatch, PagedKV, SchedulerConfig
from servelab.simulation import Served, StaticBatches

BLOCK, BLOCKS, BUDGET, NO_EOS = 16, 512, 512, -1
BATCH, CONTEXT, STEPS = 8, 512, 15
ENGINE = "engine (fast parts)"
STATIC, CONTINUOUS = "HF generate, static batches", "HF continuous batching"
WARM_UP = Workload(2, (4, 2, 8), ("What is a block?", "Why?", "Who waits?"))
TARGETS = {STATIC: 3.0, CONTINUOUS: 1.9}
MAX_STEP_RATIO = 1.15
Answers = list[list[int]]
System = Callable[[Workload], tuple[float, Answers, Served | None]]


# The course's engine


def course_system(model: LLM, pages: Pages | FastPages, static: bool = False) -> System:
    """The reference engine of unit 11 over the reference schedulers."""

    def run(work: Workload) -> tuple[float, Answers, Served]:
        kv = PagedKV(paged_kv.BlockAllocator(BLOCKS, BLOCK))
        config = SchedulerConfig(work.slots, BUDGET, eos_token_id=NO_EOS)
        made = continuous_batching.ChunkedScheduler(config, kv)
        scheduler = WatchedScheduler(StaticBatches(made, work.slots) if static else made, kv)
        requests = work.requests(encode)
        start = time.perf_counter()
        served, answers = serve(capstone.Engine(model, scheduler, kv, pages), scheduler, requests)
        return time.perf_counter() - start, list(answers.values()), served

    return run


def encode(text: str) -> list[int]:
    """The token ids of one message of a chat, up to where the answer begins."""
    return smollm.tokenizer().apply_chat_template([{"role": "user", "content": text}])


# HF transformers


def hf_model(config: LLMConfig, weights: Weights):
    """The model in HF's own code, with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_model_len,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            attn_implementation="sdpa",
        )
    )
    parts = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    parts |= {name: f"self_attn.{name}_proj" for name in "qkvo"}
    parts |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    state = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["norm"]}
    for name, weight in weights.items():
        if name.startswith("layers."):
            _, layer, part = name.split(".")
            state[f"model.layers.{layer}.{parts[part]}.weight"] = weight
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model.to(weights["norm"].device, weights["norm"].dtype).eval()


def hf_static(model) -> System:
    """`generate` on batches in the order of the requests; each batch runs until its longest answer ends."""
    from transformers import GenerationConfig

    def run(work: Workload) -> tuple[float, Answers, None]:
        prompts, answers = [prompt for _, prompt in work.requests(encode)], []
        start = time.perf_counter()
        for first in range(0, len(prompts), work.slots):
            batch, most = prompts[first : first + work.slots], work.max_tokens[first : first + work.slots]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            asked = GenerationConfig(max_new_tokens=max(most), do_sample=False, pad_token_id=0)
            ids, mask = ids.to(model.device), mask.to(model.device)
            out = model.generate(ids, attention_mask=mask, generation_config=asked)[:, width:]
            answers += [row[:n].tolist() for row, n in zip(out, most, strict=True)]
        return time.perf_counter() - start, answers, None

    return run


def hf_continuous(model) -> System:
    """HF's continuous batching with pages of 16 tokens and as many requests at the same time as the workload says."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    def run(work: Workload) -> tuple[float, Answers, None]:
        config = ContinuousBatchingConfig(
            page_size=BLOCK, num_blocks=BLOCKS, max_batch_tokens=BUDGET, max_requests_per_batch=work.slots
        )
        asked = GenerationConfig(do_sample=False, eos_token_id=NO_EOS, pad_token_id=0)
        requests, answers = work.requests(encode), {}
        with model.continuous_batching_context_manager(asked, continuous_batching_config=config) as manager:
            start = time.perf_counter()
            for request, prompt in requests:
                manager.add_request(prompt, request.id, request.max_tokens, eos_token_id=NO_EOS)
            while len(answers) < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    answers[result.request_id] = list(result.generated_tokens)
            seconds = time.perf_counter() - start
        return seconds, [answers[request.id] for request, _ in requests], None

    return run


# The machine's limit


def bandwidth(model: LLM) -> float:
    """Bytes a second, read from the memory that the model lies in."""
    buffer = torch.ones(1 << 27, device=model.device)
    return buffer.nbytes / min(seconds(lambda: buffer.sum().item()) for _ in range(5))


def matmul_rate(model: LLM) -> float:
    """Operations a second of a large matrix product, in the model's type."""
    size = 2048 if model.device.type == "cpu" else 8192
    a, b = torch.randn(2, size, size, device=model.device, dtype=model.dtype)
    return 2 * size**3 / min(seconds(lambda: (a @ b)[0, 0].item()) for _ in range(5))


def seconds(call: Callable) -> float:
    """The time of a call that ends with a number on the CPU."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def limit(model: LLM, tokens: int, contexts: list[int], rows: int, machine: dict) -> float:
    """Seconds that a step takes at least: ``tokens`` in all, whose requests end at ``contexts``, ``rows`` sampled."""
    config, shapes = model.config, model.config.shapes()
    head = config.vocab_size * config.hidden_size
    layers = sum(shape[0] * shape[1] for name, shape in shapes.items() if len(shape) > 1) - head
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    read = model.dtype.itemsize * (layers + head + kv * sum(contexts))
    pairs = sum(contexts) * tokens / len(contexts)  # query tokens times context, if all are alike
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    operations = 2 * (layers * tokens + head * rows) + attention
    return max(read / machine["bandwidth"], operations / machine["matmul_rate"])


def run_limit(model: LLM, served: Served, machine: dict) -> float:
    """The limit of all steps of a run."""
    computed: dict[str, int] = {}
    total = 0.0
    for step in served.steps:
        counts = step.prefill | dict.fromkeys(step.decode, 1)
        for id, n in counts.items():
            computed[id] = computed.get(id, 0) + n
        total += limit(model, sum(counts.values()), [computed[id] for id in counts], len(counts), machine)
    return total


# One decode step: paged against contiguous


class Slots:
    """Contexts of equal length, each in one piece: what attention costs if nothing is in pages."""

    def __init__(self, model: LLM):
        config = model.config
        shape = (config.num_layers, 2, BATCH, CONTEXT, config.num_kv_heads, config.head_dim)
        self.layers = torch.randn(shape, dtype=model.dtype, device=model.device) / 8

    def attend(self, layer: int, q, k, v):
        keys, values = self.layers[layer]
        keys[:, -1], values[:, -1] = k, v
        grouped = q.unflatten(1, (k.shape[1], -1))
        out = scaled_dot_product_attention(grouped, keys.transpose(1, 2), values.transpose(1, 2))
        return out.flatten(1, 2)


def shuffled_batch() -> FlatBatch:
    """A decode step whose blocks lie anywhere."""
    tables = torch.randperm(BLOCKS)[: BATCH * CONTEXT // BLOCK].view(BATCH, -1)
    slots = tables[:, -1] * BLOCK + BLOCK - 1
    return FlatBatch(
        torch.arange(BATCH), torch.full((BATCH,), CONTEXT - 1), [1] * BATCH, [CONTEXT] * BATCH, slots, tables
    )


@torch.no_grad()
def steps(model: LLM, pages: FastPages, machine: dict) -> dict:
    """A step over pages and one over contiguous contexts, in turn."""
    slots, batch, times = Slots(model), shuffled_batch(), []

    def step(kv) -> None:
        model.logits(model.forward(batch.tokens, batch.positions, kv)).argmax(-1).tolist()

    for _ in range(STEPS + 3):
        times.append((seconds(lambda: step(pages.bind(batch))), seconds(lambda: step(slots))))
    paged, contiguous = (statistics.median(column) for column in zip(*times[3:], strict=True))
    ratio = statistics.median(a / b for a, b in times[3:])
    best = limit(model, BATCH, [CONTEXT] * BATCH, BATCH, machine)
    return {
        "paged_ms": 1e3 * paged,
        "contiguous_ms": 1e3 * contiguous,
        "ratio": ratio,
        "limit_ms": 1e3 * best,
        "of_limit": best / paged,
        "within_target": ratio <= MAX_STEP_RATIO,
    }


# The run


def systems(fast: FastLLM, pages: FastPages, weights: Weights) -> dict[str, System]:
    """By name, those that this environment can run; the first is measured against the others."""
    readable = LLM(fast.config, weights)
    found = {
        ENGINE: course_system(fast, pages),
        "static batches (fast parts)": course_system(fast, pages, static=True),
        "engine (readable parts)": course_system(readable, Pages.of(readable, BLOCKS, BLOCK, paged_kv)),
    }
    try:
        import transformers
    except ModuleNotFoundError:
        print("without HF transformers, which this environment does not have", file=sys.stderr)
        return found
    transformers.utils.logging.set_verbosity_error()
    model = hf_model(fast.config, weights)
    return found | {STATIC: hf_static(model), CONTINUOUS: hf_continuous(model)}


def measure(name: str, found: dict[str, System], repeats: int, model: LLM, machine: dict) -> list[dict]:
    """A row for each system on one workload."""
    work, runs = workload(name), []
    for number in range(repeats):
        runs.append([])
        for kind, rate in (("bandwidth", bandwidth(model)), ("matmul_rate", matmul_rate(model))):
            machine[kind] = max(rate, machine.get(kind, 0.0))
        for label, run in found.items():
            runs[-1].append(run(work))
            rate = sum(work.max_tokens) / runs[-1][-1][0]
            print(f"{name} {number}: {label}: {rate:.1f} tokens/s, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    rows, useful = [], sum(work.max_tokens)
    for column, label in enumerate(found):
        times = [run[column][0] for run in runs]
        _, answers, served = runs[0][column]
        row = {
            "workload": name,
            "system": label,
            "tokens_per_s": useful / statistics.median(times),
            "times": times,
            "ratio": statistics.median(run[column][0] / run[0][0] for run in runs),
            "same_answers": sum(a == b for a, b in zip(answers, runs[0][0][1], strict=True)),
        }
        if served is not None:
            row["steps"] = len(served.steps)
            row["of_limit"] = run_limit(model, served, machine) / statistics.median(times)
        if name == "w32" and label in TARGETS:
            row["within_target"] = row["ratio"] >= TARGETS[label]
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=["w16", "w32"], choices=["w16", "w32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="of the other systems those with this in their name")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        config, weights = smollm.load(torch.float32 if args.device == "cpu" else torch.bfloat16, args.device)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2
    model = FastLLM(config, weights)
    pages = fast_pages(model, BLOCKS, BLOCK)
    found = systems(model, pages, weights)
    found = {name: run for name, run in found.items() if name == ENGINE or any(w in name for w in args.only)}
    machine: dict[str, float] = {}
    for run in found.values():
        run(WARM_UP)
    rows = [row for name in args.workloads for row in measure(name, found, args.repeats, model, machine)]
    step = steps(model, pages, machine)
    figures = {"machine": machine, "threads": args.threads, "load": os.getloadavg()[0], "rows": rows, "step": step}
    print(json.dumps(figures, indent=2) if args.json else table(figures))
    return 0 if all(row.get("within_target", True) for row in [*rows, step]) else 1


def table(figures: dict) -> str:
    """The figures as text."""
    machine, step = figures["machine"], figures["step"]
    rates = f"{machine['bandwidth'] / 1e9:.1f} GB/s, {machine['matmul_rate'] / 1e9:.0f} GFLOP/s"
    lines = [f"{figures['threads']} threads: {rates}; load {figures['load']:.1f}"]
    lines.append(f"{'':4} {'system':28}{'tokens/s':>9}{'engine is':>12}{'of the limit':>14}{'steps':>7}  same answers")
    for row in figures["rows"]:
        missed = "" if row.get("within_target", True) else "  misses its target"
        share = f"{row['of_limit']:.0%}{row['steps']:7}" if "steps" in row else " " * 7
        rate = f"{row['tokens_per_s']:9.1f}{row['ratio']:6.2f} times{share:>21}"
        lines.append(f"{row['workload']:4} {row['system']:28}{rate}{row['same_answers']:6}{missed}")
    missed = "" if step["within_target"] else "  misses its target"
    lines.append(
        f"a step of {BATCH} requests with contexts of {CONTEXT}: paged {step['paged_ms']:.1f} ms, "
        f"contiguous {step['contiguous_ms']:.1f} ms, {step['ratio']:.2f} times (target: at most {MAX_STEP_RATIO}), "
        f"{step['of_limit']:.0%} of the limit{missed}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
