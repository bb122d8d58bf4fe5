"""Which source of states a job uses. Rows behind the seam know nothing of configs or stores."""

from __future__ import annotations

from peagle.data.rows import TokenRow
from peagle.states.config import ExtractConfig
from peagle.states.store import StoreSpec
from peagle.verifier.facts import VerifierFacts
from peagle.verifier.source import StateSource
from peagle.verifier.weights import VerifierHead

_CHECKED_TOKENS = 64


def open_source(
    config: ExtractConfig,
    spec: StoreSpec,
    facts: VerifierFacts,
    head: VerifierHead | None,
    sample: TokenRow,
    rank: int = 0,
) -> StateSource:
    """Open the source that a job asks for.

    Args:
        config: `endpoint` and `backend` decide.
        spec: layer ids and dtype.
        facts: the verifier.
        head: from its files; the Transformers backend proves it on `sample` before the job starts.
        sample: any row.
        rank: of several processes that make the same store: their files must not be taken for one another's.

    Raises:
        PeagleError: the verifier cannot be loaded or reached, or its files do not give its own logits.
    """
    store = str(config.output.resolve()) + (f"#{rank}" if rank else "")
    if config.endpoint:
        from peagle.verifier.vllm_client import RetryPolicy
        from peagle.verifier.vllm_endpoint import EndpointSettings, EndpointSource

        settings = EndpointSettings(
            urls=config.endpoint,
            api_key=config.api_key,
            model=config.served_model_name,
            concurrency=config.concurrency,
            policy=RetryPolicy(config.request_timeout_s, config.max_retries, config.restart_wait_s),
            hidden_states_path=config.hidden_states_path or config.output,
        )
        return EndpointSource(facts, spec.aux_layer_ids, spec.dtype, settings, store, config.validate_outputs)
    if config.backend == "vllm":
        from peagle.verifier.vllm_inprocess import InProcessSource

        folder = config.hidden_states_path or config.output
        arguments = config.extra_args
        return InProcessSource(facts, spec.aux_layer_ids, spec.dtype, folder, store, config.validate_outputs, arguments)
    from peagle.verifier.transformers import TransformersVerifier
    from peagle.verifier.transformers_source import TransformersSource

    verifier = TransformersVerifier(facts, spec.dtype, config.device)
    if head is not None:
        verifier.check_head(head, sample.input_ids[:_CHECKED_TOKENS])
    return TransformersSource(verifier, spec.aux_layer_ids, config.batch_size, config.validate_outputs)
