"""Whether a checkpoint fits the verifier that it names, and the engine that would serve both."""

import torch
from safetensors import SafetensorError

from peagle.drafter.card import run_facts
from peagle.errors import ConfigError, VerifierError
from peagle.serve.config import CheckConfig
from peagle.serve.config_rules import ServedShape
from peagle.serve.files import CONFIG, Findings, RawCheckpoint
from peagle.verifier.model_config import VerifierConfig, load_verifier_config
from peagle.verifier.weights import load_embedding, load_head
from peagle.vllm.launch import MIN_VERSION, InstalledVllm, detour_arguments, needs_detour

MIN_EAGLE3 = (0, 10)
"""First vLLM that reads Speculators' EAGLE-3 checkpoints."""
LAST_WRONG_CPU_SAMPLING = (0, 32)
"""Its `_expand_kernel_impl` for CPU drops the expanded temperature: found by a chi-square test in `tests/vllm/real`."""
_SAMPLED_ROWS = 4096
_UNRELATED_COSINE = 0.1
# Of rows that were rounded to another dtype, and back.
_SAME_COSINE = 0.999


def check_verifier(
    raw: RawCheckpoint, shape: ServedShape, name_or_path: str, config: CheckConfig, findings: Findings
) -> VerifierConfig | None:
    """Compare a drafter with its verifier's configuration; returns that, or None if it is out of reach."""
    # 1. Which verifier it is.
    try:
        verifier = load_verifier_config(name_or_path, config.trust_remote_code)
    except VerifierError as error:
        advice = f"name it with --verifier-name-or-path, or correct {CONFIG}"
        findings.error("verifier", f"cannot be reached ({error}); {advice}")
        return None
    if name_or_path != shape.verifier:
        text = f"checked against {name_or_path}; config.json names {shape.verifier}, which vLLM would load"
        findings.warning("verifier", text)
    its, wanted = ", ".join(verifier.architectures), ", ".join(shape.verifier_architectures)
    if wanted and its != wanted:
        findings.error("verifier", f"is a {its}; the drafter was made for a {wanted}")
    # 2. Its sizes, layers and dtype.
    for name in ("target_hidden_size", "vocab_size", "hidden_size"):
        its_name = name.removeprefix("target_")
        mine, its_size = getattr(shape, name), getattr(verifier, its_name)
        if mine != its_size:
            findings.error(CONFIG, f"{name} is {mine}, the verifier's {its_name} is {its_size}")
    beyond = [i for i in shape.aux_layer_ids if i > verifier.num_layers]
    if beyond:
        text = f"layer id {beyond[0]} does not exist in the verifier, which has {verifier.num_layers} layers"
        findings.error(CONFIG, text)
    if shape.dtype and shape.dtype != verifier.dtype:
        text = f"dtype is {shape.dtype}, the verifier's {verifier.dtype}; vLLM converts the drafter to its own"
        findings.warning(CONFIG, text)
    # 3. The rotary table, and the length that the server would serve.
    length, own = config.max_model_len or verifier.max_position_embeddings, shape.max_position_embeddings
    if own < length:
        text = f"max_position_embeddings is {own}, the server's length {length}: vLLM lengthens the rotary table, but "
        text += f"the drafter was not trained past its own; write {length}, or serve with --max-model-len {own}"
        findings.warning(CONFIG, text)
    # 4. Tokens: a pruned vocabulary should keep those that end an answer.
    if shape.mask_token_id is not None and shape.mask_token_id in verifier.eos_token_ids:
        findings.warning(CONFIG, f"mask_token_id {shape.mask_token_id} is the verifier's end token")
    ends = list(verifier.eos_token_ids)
    has_table = "d2t" in raw.tensors and raw.tensors["d2t"].shape == (shape.draft_vocab_size,)
    if ends and has_table and set(raw.draft_ids().tolist()).isdisjoint(ends):
        findings.warning("d2t", f"no end token ({ends}) is in the draft vocabulary: ends are never drafted")
    return verifier


def check_embedding(raw: RawCheckpoint, shape: ServedShape, verifier: VerifierConfig, findings: Findings) -> None:
    """A trained embedding stays close to the verifier's; one that has nothing to do with it was never copied."""
    name = "embed_tokens.weight"
    if name not in raw.tensors or raw.tensors[name].shape != (verifier.vocab_size, verifier.hidden_size):
        return
    try:
        theirs = load_embedding(verifier)
    except (VerifierError, SafetensorError, OSError) as error:
        findings.note("verifier", f"its embedding was not compared: {error}")
        return
    rows = _sampled(verifier.vocab_size)
    ours = raw.read(name)[rows].float()
    theirs = theirs[rows].float()
    if torch.equal(ours.to(torch.bfloat16), theirs.to(torch.bfloat16)):
        findings.note(name, "is the verifier's")
        return
    scale = theirs.norm(dim=1)
    used = scale > 1e-3 * scale.median()
    cosine = float(torch.nn.functional.cosine_similarity(ours[used], theirs[used], dim=1).median())
    if cosine < _UNRELATED_COSINE:
        findings.warning(
            name,
            f"has nothing in common with the verifier's (median cosine {cosine:.2f}): an embedding that was never "
            "copied or trained costs acceptance without any error",
        )
    else:
        findings.note(name, f"was trained (median cosine with the verifier's {cosine:.2f})")


def _sampled(num_rows: int) -> torch.Tensor:
    """Rows of a table that stand for all of it, ascending, int64."""
    return torch.linspace(0, num_rows - 1, min(_SAMPLED_ROWS, num_rows)).long().unique()


def check_head(raw: RawCheckpoint, shape: ServedShape, verifier: VerifierConfig, findings: Findings) -> None:
    """A drafter's head is the verifier's, or was trained by a run that says so: `train_lm_head` of its run.yaml."""
    name = "lm_head.weight"
    has_shape = name in raw.tensors and raw.tensors[name].shape == (shape.draft_vocab_size, verifier.hidden_size)
    if not has_shape or (shape.is_pruned and findings.of("error")):
        return
    try:
        theirs = load_head(verifier)
        facts = run_facts(raw.folder)
    except (VerifierError, SafetensorError, OSError, ValueError) as error:
        findings.note("verifier", f"its head was not compared: {error}")
        return
    rows = _sampled(shape.draft_vocab_size)
    own = theirs.weight[raw.draft_ids()[rows] if shape.is_pruned else rows].float()
    cosines = torch.nn.functional.cosine_similarity(raw.read(name)[rows].float(), own, dim=1)
    used = own.norm(dim=1) > 0
    if bool((cosines[used] > _SAME_COSINE).all()):
        return
    cosine, settings = float(cosines[used].median()), facts.get("settings", {})
    if settings.get("train_lm_head"):
        findings.note(name, f"was trained (median cosine with the verifier's {cosine:.2f})")
    elif "train_lm_head" in settings:
        findings.error(
            name,
            f"is not the verifier's (median cosine {cosine:.2f}), and its run did not train it: replaced, or of "
            "another verifier",
        )
    else:
        findings.warning(
            name,
            f"is not the verifier's (median cosine {cosine:.2f}), and no run.yaml says that it was trained: right for "
            "a drafter whose trainer trains heads, else it was replaced",
        )


def check_engine(
    shape: ServedShape, architectures: tuple[str, ...], engine: InstalledVllm | None, findings: Findings
) -> None:
    """Compare with the installed vLLM, or the version asked about."""
    if engine is None:
        findings.note("vLLM", "is not installed here; its version and its support for the verifier were not checked")
        return
    if "cpu" in engine.version and engine.release <= LAST_WRONG_CPU_SAMPLING:
        findings.warning(
            "vLLM",
            f"{engine.version}: its CPU kernels sample wrongly with a drafter at temperature > 0 (greedy answers are "
            "right; GPUs are not affected)",
        )
    needed = MIN_VERSION if shape.kind == "peagle" else MIN_EAGLE3
    if engine.release < needed:
        least = f"{needed[0]}.{needed[1]} or newer"
        findings.error("vLLM", f"{engine.version} does not know {shape.kind} checkpoints; they need {least}")
    elif engine.release < MIN_VERSION and (shape.norm_before_fc or shape.fc_norm):
        name, first = "norm_before_fc" if shape.norm_before_fc else "fc_norm", ".".join(map(str, MIN_VERSION))
        findings.warning("vLLM", f"{engine.version} may ignore {name}; {first} and newer read it")
    if not architectures:
        return
    try:
        detour_arguments(engine, architectures)
    except ConfigError as error:
        findings.error("vLLM", str(error))
    else:
        if needs_detour(engine, architectures):
            findings.warning(
                "vLLM",
                f"{engine.version} has no EAGLE-3 support in its own {', '.join(architectures)}; `peagle serve` goes "
                "through its Transformers backend (--hf-overrides), plain `vllm serve` stops",
            )
