"""A vLLM engine that answers requests on its standard input: one JSON object a line, each answered by one.

    {"op": "generate", "prompts": [[1, 2, 3]], "max_tokens": 8, "salts": [null], "transfer_params": null}
    {"op": "reset"}

With a socket, KvikConnector keeps its KV in the store daemon that listens there. With `--extra`, a JSON object, it has these
settings too. With `--processes`, scheduler and worker run in processes of their own, as below a server: the scheduler goes on when the
last request has ended.
"""

import argparse
import json
import os
import sys
import time

HAS_PROCESSES = "--processes" in sys.argv
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(HAS_PROCESSES))
if "--ranks" in sys.argv:
    # vLLM places ranks by itself only on memory of their own.
    cores = sorted(os.sched_getaffinity(0))
    ranks = range(int(sys.argv[sys.argv.index("--ranks") + 1]))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in ranks)

from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402


def engine(arguments: argparse.Namespace) -> LLM:
    transfer = None
    if arguments.socket is not None or arguments.extra is not None:
        extra = json.loads(arguments.extra or "{}")
        if arguments.socket is not None:
            extra["socket"] = arguments.socket
        transfer = KVTransferConfig(
            kv_connector="KvikConnector",
            kv_connector_module_path="kvik.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=arguments.policy,
            kv_connector_extra_config=extra,
        )
    return LLM(
        model=arguments.model,
        # Greedy tokens do not depend on what else is in the batch: sums in bf16 would.
        dtype=arguments.dtype,
        block_size=32,
        max_model_len=arguments.max_tokens,
        max_num_batched_tokens=arguments.step_tokens,
        max_num_seqs=32,
        enforce_eager=True,
        num_gpu_blocks_override=arguments.blocks,
        kv_transfer_config=transfer,
        distributed_executor_backend="mp" if HAS_PROCESSES else "uni",
        tensor_parallel_size=arguments.ranks,
        disable_hybrid_kv_cache_manager=True if arguments.one_group else None,
        disable_log_stats=False,
    )


def generate(llm: LLM, request: dict) -> dict:
    prompts = []
    for tokens, salt in zip(request["prompts"], request["salts"], strict=True):
        prompt = TokensPrompt(prompt_token_ids=tokens)
        if salt is not None:
            prompt["cache_salt"] = salt
        prompts.append(prompt)
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
    if request["transfer_params"] is not None:
        sampling.extra_args = {"kv_transfer_params": request["transfer_params"]}
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "seconds": time.perf_counter() - begin,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "preemptions": preemptions(llm),
    }


def groups(llm: LLM) -> dict:
    """The kinds of the groups of KV, and how often vLLM frees other blocks of them than `kvik.windows` says. Of an engine in
    this process."""
    from types import SimpleNamespace

    from kvik.vllm.groups import window_of
    from kvik.windows import Window
    from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager

    managers = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers
    n_different = 0
    for n_tokens in range(2048):
        for manager in managers:
            first_block = manager.get_num_skipped_tokens(n_tokens) // manager.block_size
            n_different += first_block != window_of(manager.kv_cache_spec).first_block(n_tokens)
        local = SimpleNamespace(attention_chunk_size=96)
        skipped = ChunkedLocalAttentionManager.get_num_skipped_tokens(local, n_tokens)
        n_different += skipped // 32 != Window(32, section_tokens=96).first_block(n_tokens)
    return {"kinds": [type(manager.kv_cache_spec).__name__ for manager in managers], "n_different": n_different}


def preemptions(llm: LLM) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def reset(llm: LLM) -> dict:
    """Empties the engine's own cache. Blocks that saves hold are given back in the steps that follow."""
    while not llm.reset_prefix_cache():
        sampling = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([TokensPrompt(prompt_token_ids=[5])], sampling, use_tqdm=False)
    return {}


def counts(llm: LLM) -> dict:
    """What kvik has counted, and vLLM has fetched from it."""
    from prometheus_client import REGISTRY

    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    names = {sample.name for sample in samples if sample.name.startswith("kvik_vllm_") and sample.name.endswith("_total")}
    return {
        name.removeprefix("kvik_vllm_").removesuffix("_total"): sum(one.value for one in samples if one.name == name)
        for name in names
    }


OPERATIONS = {
    "generate": generate,
    "reset": lambda llm, _: reset(llm),
    "groups": lambda llm, _: groups(llm),
    "counts": lambda llm, _: counts(llm),
}


def main(operations: dict = OPERATIONS) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--socket")
    parser.add_argument("--extra")
    parser.add_argument("--policy", default="recompute")
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--step-tokens", type=int, default=4096)
    parser.add_argument("--one-group", action="store_true")
    llm = engine(parser.parse_args())
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = operations[request["op"]](llm, request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
