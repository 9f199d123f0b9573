"""The fast sampler: vLLM's engine, stepped inside our process.

Stepping it ourselves is what lets weights change between two decoding steps while requests are in
flight. A logits processor, vLLM's supported extension point, sees the logits of every running
request before its token is drawn.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm import EngineArgs, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from engine.backends import Decoded, Request
from engine.names import WeightsMismatchError
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
            max_num_seqs=slots + 1,  # one for an urgent request
            kv_cache_memory_bytes=int(memory_gib * 2**30),
            logits_processors=[Recorder],
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._recorder = Recorder.latest
        self._recorder.prepare(vocabulary, temperature)
        self._stop_ids = list(stop_ids)
        self._temperature = temperature
        self._dtype = dtype
        self._slots = slots
        self._queue: deque[Request] = deque()

    @property
    def running(self) -> int:
        return len(self._queue) + self._engine.get_num_unfinished_requests()

    def add(self, request: Request) -> None:
        if request.urgent:
            self._start(request)
        else:
            self._queue.append(request)

    def _start(self, request: Request) -> None:
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
        while self._queue and self._engine.get_num_unfinished_requests() < self._slots:
            self._start(self._queue.popleft())
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
        weights.check_type(self._dtype)
        self._engine.collective_rpc(_exchange, args=(weights,))
        self._engine.apply_model(_repack_head)
        if reprefill:  # preempted, they are prefilled when they come back, with all their tokens
            self._engine.reset_prefix_cache(reset_running_requests=True)


def _exchange(worker: Any, weights: Weights) -> None:
    """Replaces a worker's weights, as its `reload_weights` does, and sees to it that all were.

    Loaders pass over names that they don't know and leave what nobody gives them, so it is counted
    what of the published tensors was read, and which of the model's parameters were written."""
    model, config = worker.get_model(), worker.vllm_config
    tensors = dict(weights.tensors())
    gaps = {name for name, _ in model.named_parameters()}
    _forget_experts(model)
    with set_current_vllm_config(config), _Reads(tensors) as reads:
        initialize_layerwise_reload(model)
        written = model.load_weights(tensors.items())
        gaps -= written or set()
        gaps |= {name for name, layer in model.named_modules() if _in_part(layer)}
        _refuse(weights.version, "the worker got nothing, or a part, for", gaps)
        finalize_layerwise_reload(model, config.model_config)
    _refuse(weights.version, "the worker didn't take", reads.left())


def _forget_experts(model: torch.nn.Module) -> None:
    """Experts are packed for a CPU's kernels only where there is no kernel yet: a second load would
    put new weights, unpacked, where the kernel expects packed ones."""
    for layer in model.modules():
        if isinstance(layer, RoutedExperts) and layer.w13_weight.device.type == "cpu":
            layer.quant_method.moe_kernel = None


def _in_part(layer: torch.nn.Module) -> bool:
    """Whether a layer has got some of its parameters only."""
    info = get_layerwise_info(layer)
    # An embedding is loaded as one tensor, without the rows that fill it up.
    whole = isinstance(layer, VocabParallelEmbedding) or info.load_numel_total is None
    return not whole and 0 < info.load_numel < info.load_numel_total


def _refuse(version: int, what: str, names: set[str]) -> None:
    if names:
        some = ", ".join(sorted(names)[:4])
        raise WeightsMismatchError(
            f"weights of version {version} don't fit vLLM's model: {what} {len(names)} tensors, as "
            f"{some}; try rollout.backend=hf, and report this model"
        )


class _Reads(TorchDispatchMode):
    """Counts the elements of each tensor that are read into another with memory of its own."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        placed = sorted((t.data_ptr(), t.nbytes, t.numel(), name) for name, t in tensors.items())
        self._starts = [start for start, *_ in placed]
        self._ends = [start + size for start, size, *_ in placed]
        self._names = [name for *_, name in placed]
        self._left = [count for _, _, count, _ in placed]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if not func.is_view and not (isinstance(result, Tensor) and result.is_meta):
            for value in tree_leaves(args):
                if isinstance(value, Tensor) and not value.is_meta:
                    self._count(value)
        return result

    def _count(self, tensor: Tensor) -> None:
        place = bisect_right(self._starts, tensor.data_ptr()) - 1
        if place >= 0 and tensor.data_ptr() < self._ends[place]:
            self._left[place] -= tensor.numel()

    def left(self) -> set[str]:
        """Names of the tensors that were not read as a whole."""
        return {name for name, left in zip(self._names, self._left, strict=True) if left > 0}


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
