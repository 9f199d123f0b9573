"""The fast sampler: vLLM's engine, stepped inside our process.

Stepping it ourselves is what lets weights change between two decoding steps while requests are in
flight. A logits processor, vLLM's supported extension point, sees the logits of every running
request before its token is drawn.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import EngineArgs, SamplingParams
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from engine.backends import Decoded, Request
from engine.weights import Weights


class VLLMSampler:
    """Samples from vLLM; see `engine.backends.Sampler`. One to a process: vLLM's parallel groups
    are global."""

    def __init__(
        self,
        model: str,
        vocabulary: int,
        stop_ids: Sequence[int],
        temperature: float,
        slots: int,
        max_length: int,
        memory_gib: float,
        dtype: torch.dtype,
        trust_remote_code: bool,
        seed: int,
    ) -> None:
        arguments = EngineArgs(
            model=model,
            dtype=str(dtype).removeprefix("torch."),
            trust_remote_code=trust_remote_code,
            skip_tokenizer_init=True,  # ids in, ids out
            enforce_eager=True,  # compiling takes longer than a small model's whole run
            enable_prefix_caching=False,  # its blocks would outlive the weights that made them
            async_scheduling=False,  # a step's tokens come back with the step that drew them
            seed=seed,
            max_model_len=max_length,
            max_num_seqs=slots,
            kv_cache_memory_bytes=int(memory_gib * 2**30),
            logits_processors=[Recorder],
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._recorder = Recorder.latest
        self._recorder.prepare(vocabulary, temperature)
        self._stop_ids = list(stop_ids)
        self._temperature = temperature

    @property
    def running(self) -> int:
        return self._engine.get_num_unfinished_requests()

    def add(self, request: Request) -> None:
        parameters = SamplingParams(
            temperature=0.0 if request.greedy else self._temperature,
            top_p=1.0,  # explicit: the model's own generation defaults must not apply
            top_k=0,
            # No seed: vLLM rewinds a request's generator after a partial prefill, which a CPU's
            # generator can't do. The engine's own seed stands for all requests.
            max_tokens=request.max_new_tokens,
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # the stop ids are ours: a model may name another end
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"ticket": request.ticket},
        )
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        self._engine.add_request(str(request.ticket), prompt, parameters)

    def step(self) -> Decoded:
        tickets, ids, finished = [], [], {}
        for output in self._engine.step():
            completion = output.outputs[0]
            ticket = int(output.request_id)
            tickets.append(ticket)
            (token,) = completion.token_ids
            ids.append(token)
            if completion.finish_reason is not None:
                finished[ticket] = completion.finish_reason
        return Decoded(
            tickets,
            torch.tensor(ids, dtype=torch.long),
            self._recorder.logprobs_of(tickets),
            finished,
        )

    def load(self, weights: Weights, reprefill: bool = False) -> None:
        # `reload_weights` repacks for the CPU kernels, which loading into the module doesn't.
        self._engine.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": weights.tensors()}
        )
        self._engine.apply_model(_repack_head)
        if reprefill:  # preempted, they are prefilled when they come back, with all their tokens
            self._engine.reset_prefix_cache(reset_running_requests=True)


def _repack_head(model: torch.nn.Module) -> None:
    """A head tied to the embedding gets its new values through it, and on a CPU would go on with
    the packed copy of its old ones."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


class Recorder(LogitsProcessor):
    """Keeps the distribution that each running request's next token is drawn from."""

    latest: "Recorder"

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        Recorder.latest = self  # vLLM builds it and shows it to nobody
        self._tickets: dict[int, int] = {}  # row of vLLM's batch → ticket
        self._vocabulary = 0
        self._temperature = 1.0
        self._logprobs = torch.zeros(0, 0)
        self._rows: dict[int, int] = {}

    def prepare(self, vocabulary: int, temperature: float) -> None:
        self._vocabulary, self._temperature = vocabulary, temperature

    def is_argmax_invariant(self) -> bool:
        return False  # called for greedy requests too, and before the temperature is applied

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._tickets.pop(row, None)
        for row, parameters, _, _ in batch_update.added:
            self._tickets[row] = parameters.extra_args["ticket"]
        for source, target, direction in batch_update.moved:
            moved = self._tickets.pop(source, None)
            displaced = self._tickets.pop(target, None)
            if moved is not None:
                self._tickets[target] = moved
            if direction == MoveDirectionality.SWAP and displaced is not None:
                self._tickets[source] = displaced

    def apply(self, logits: Tensor) -> Tensor:
        if self._vocabulary:  # 0 while vLLM warms up
            logits[:, self._vocabulary :] = -torch.inf  # ids that the tokenizer doesn't have
            own = logits[:, : self._vocabulary].float() / self._temperature
            self._logprobs = own.log_softmax(-1)
            self._rows = {ticket: row for row, ticket in self._tickets.items()}
        return logits

    def logprobs_of(self, tickets: list[int]) -> Tensor:
        """[len(tickets), V] of the last step."""
        return self._logprobs[[self._rows[ticket] for ticket in tickets]]
