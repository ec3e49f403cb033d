"""The vLLM engine of `vllm_engine.py`, in one process, whose next load inside of a step is disturbed where a test says.

    {"op": "step_load", "prompts": [[1, 2, 3], ...], "max_tokens": 8, "fault": {"at": 0, "signal": 9, "pid": 123}}

begins with the first prompt, and gives the engine the others after the first step. `at` is the number of the layer before which the fault
happens, or -1 for before the load. What can happen: a `signal` to `pid`; `n_stored`: the store has no more than so many tokens of the
prompt; `is_aborted`: the request is aborted while it is computed; `skips`: the engine does not wait for that layer. An
answer has the tokens and the reason of the end of every prompt, and the number of blocks that the load reported as failed.
"""

import itertools
import os

from vllm_engine import OPERATIONS, counts, main

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer import get_kv_transfer_group

NUMBERS = itertools.count()


class Fault:
    """Takes the place of two calls of the connector until a load inside of a step has ended."""

    def __init__(self, llm: LLM, fault: dict, tokens: list[int]) -> None:
        self.core = llm.llm_engine.engine_core.engine_core
        self.fault = fault
        self.tokens = tokens
        self.connector = get_kv_transfer_group()
        self.layers = list(self.connector.worker.layers.numbers)
        # The request whose load is disturbed.
        self.request_id: str | None = None
        self.start, self.wait = self.connector.start_load_kv, self.connector.wait_for_layer_load
        self.connector.start_load_kv, self.connector.wait_for_layer_load = self.begin, self.wait_for_layer

    def remove(self) -> None:
        del self.connector.start_load_kv, self.connector.wait_for_layer_load

    def begin(self, forward_context: object, **kwargs: object) -> None:
        orders = self.connector.orders().step_loads
        if orders and self.request_id is None:
            self.request_id = orders[0].request_id
            if (n_stored := self.fault.get("n_stored")) is not None:
                # What follows was never stored.
                others = [7] * (len(self.tokens) - n_stored)
                store = self.connector.store
                orders[0].chain = store.chain(self.tokens[:n_stored] + others).pack(len(self.tokens) // store.chunk_tokens)
            self.happen(-1)
        self.start(forward_context, **kwargs)

    def wait_for_layer(self, layer_name: str) -> None:
        layer = self.layers.index(layer_name)
        running = self.connector.worker.layers.running
        is_now = any(load.order.request_id == self.request_id for load in running)
        if is_now:
            self.happen(layer)
        if not (is_now and self.fault.get("skips") == layer):
            self.wait(layer_name)

    def happen(self, at: int) -> None:
        if self.fault.get("at") != at:
            return
        if "signal" in self.fault:
            os.kill(self.fault["pid"], self.fault["signal"])
        if self.fault.get("is_aborted"):
            # As the threads of a server do while a step is computed.
            self.core.aborts_queue.put_nowait([self.request_id])


def step_load(llm: LLM, request: dict) -> dict:
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
    names = [f"fault-{next(NUMBERS)}" for _ in request["prompts"]]
    prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in request["prompts"]]
    before = counts(llm)
    fault = Fault(llm, request["fault"], request["prompts"][0])
    outputs = {}
    llm.llm_engine.add_request(names[0], prompts[0], sampling)
    while fault.request_id is None and llm.llm_engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.llm_engine.step()}
    for name, prompt in zip(names[1:], prompts[1:], strict=True):
        llm.llm_engine.add_request(name, prompt, sampling)
    if request["fault"].get("is_aborted"):
        # The engine knows; what counts the requests of the caller does not.
        llm.llm_engine.abort_request(names[:1])
    while llm.llm_engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.llm_engine.step()}
    fault.remove()
    # The counts of a step are fetched with it.
    after = counts(llm)
    ended = [outputs.get(name) for name in names]
    return {
        "tokens": [None if output is None else list(output.outputs[0].token_ids) for output in ended],
        "reasons": [None if output is None else output.outputs[0].finish_reason for output in ended],
        "counts": {name: count - before.get(name, 0) for name, count in after.items()},
        "has_begun": fault.request_id is not None,
    }


if __name__ == "__main__":
    main(OPERATIONS | {"step_load": step_load})
