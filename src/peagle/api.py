"""The Python interface: a drafter with its verifier as one object that lays out, trains a step, writes answers.

In: a checkpoint, a store. Out: what the packages give, made with the defaults of the commands. Nothing is decided here
that a package does not decide; for another setting, call the package. Public: `load`, `read`, `SpeculativeModel`,
`Written`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from peagle import layout
from peagle.data.tokenizer import load_tokenizer
from peagle.drafter import checkpoint as drafter_checkpoint
from peagle.drafter.network import Drafter
from peagle.engine import Answer, Engine, Request, Sampling
from peagle.errors import ConfigError
from peagle.hidden_states.batch import Batch, pack
from peagle.hidden_states.store import StoreReader
from peagle.layout.cod import CodLayout
from peagle.train.batches import generator
from peagle.train.masters import choose_trained
from peagle.train.parallel import World
from peagle.train.plan import TrainPlan, default_config, resolve
from peagle.train.step import StepResult, num_supervised, train_step
from peagle.verifier.local import TransformersVerifier, resolve_device
from peagle.verifier.model_config import VerifierConfig, load_verifier_config
from peagle.verifier.special_tokens import eos_ids
from peagle.verifier.weights import VerifierHead, load_head


@dataclass(frozen=True)
class Written:
    """An answer."""

    text: str
    answer: Answer
    """Its token ids, why it ended, and every verifier pass."""

    @property
    def accepted(self) -> list[int]:
        """Drafted tokens that each verifier pass accepted."""
        return [one.num_accepted for one in self.answer.passes]


@dataclass(frozen=True)
class SpeculativeModel:
    """A drafter and the verifier that it was trained for. The verifier is loaded when it is first needed."""

    drafter: Drafter
    verifier_config: VerifierConfig
    """The verifier's sizes, token ids and tensor names, from its configuration."""
    trust_remote_code: bool

    @property
    def device(self) -> torch.device:
        """Where both compute."""
        return self.drafter.fc.weight.device

    @cached_property
    def verifier(self) -> TransformersVerifier:
        """The whole verifier, in the drafter's dtype."""
        return TransformersVerifier(self.verifier_config, self.drafter.fc.weight.dtype, self.device)

    @cached_property
    def head(self) -> VerifierHead:
        """The verifier's norm and head, restricted to the drafter's vocabulary; read without the rest."""
        head = load_head(self.verifier_config).to(self.device, self.drafter.fc.weight.dtype)
        return head.restricted(self.drafter.draft_ids) if self.drafter.config.is_pruned else head

    @cached_property
    def tokenizer(self) -> Any:
        """The verifier's."""
        return load_tokenizer(self.verifier_config.name_or_path, self.trust_remote_code)

    @cached_property
    def training(self) -> TrainPlan:
        """What `peagle train` would do with this drafter, by its defaults."""
        dtype = str(self.drafter.fc.weight.dtype).removeprefix("torch.")
        config = default_config(self.drafter.config, "bfloat16" if dtype == "float16" else dtype)
        return resolve(config, self.drafter.config, World(0, 1, self.device))

    def lay_out(self, batch: Batch, seed: int = 0) -> CodLayout:
        """Draw which slots of depth 1 and more a training step takes, document by document."""
        return layout.sample(
            is_supervised=batch.is_supervised.cpu(),
            document_ids=batch.document_ids.cpu(),
            num_depths=self.training.num_depths,
            down_sample_ratio=self.training.down_sample_ratio,
            down_sample_ratio_min=self.training.down_sample_ratio_min,
            generators=[generator("cod", seed, 0, row_id) for row_id in batch.row_ids],
        )

    def train_step(self, batch: Batch, slots: CodLayout) -> StepResult:
        """Add the gradient of the mean loss to each trained parameter's `.grad`.

        Returns:
            Sums of losses and of right choices per depth, and how many slots each depth has.
        """
        choose_trained(self.drafter, self.training.train_embeddings, self.training.train_lm_head)
        batch = batch.to(self.device, self.drafter.fc.weight.dtype)
        slots = slots.to(self.device)
        return train_step(self.drafter, self.head, batch, slots, num_supervised(batch, slots), self.training.step)

    def write(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int = 512,
        num_speculative_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        batch_size: int = 1,
    ) -> list[Written]:
        """Answer prompts by speculative decoding: greedily the verifier's own text, sampled its own distribution.

        Args:
            prompts: what the user says, one text or several; each goes through the chat template as one turn.
            max_new_tokens: longest answer, its end token included.
            num_speculative_tokens: drafted per verifier pass; None: as many as the drafter was made for.
            temperature, top_p, seed: of the sampling; temperature 0 is greedy.
            batch_size: prompts decoded side by side.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        depth = self.drafter.config.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        engine = Engine(
            model=self.verifier.model,
            drafter=self.drafter.eval(),
            num_speculative_tokens=depth,
            eos_token_ids=eos_ids(self.verifier_config, self.tokenizer),
            sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
            batch_size=batch_size,
        )
        turns = [[{"role": "user", "content": text}] for text in texts]
        rendered = [self.tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False) for t in turns]
        answers = engine.generate([Request(list(ids), max_new_tokens) for ids in rendered])
        return [Written(self.tokenizer.decode(one.ids, skip_special_tokens=True), one) for one in answers]


def load(
    checkpoint: str | Path,
    verifier: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> SpeculativeModel:
    """Load a drafter, and the configuration of the verifier that it names.

    Args:
        checkpoint: a folder or a hub id.
        verifier: a folder or hub id in place of the one that the checkpoint names.
        dtype: in which both compute, also by name ("bfloat16"); `torch.bfloat16` is usual on a GPU.
        device: "cpu", "cuda", "cuda:1"; "auto": the first GPU, else the CPU.
        trust_remote_code: let the verifier's own code run.

    Raises:
        PeagleError: the checkpoint or the verifier cannot be used; the message says which and why.
    """
    if isinstance(dtype, str):
        if dtype not in drafter_checkpoint.DTYPES:
            raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(drafter_checkpoint.DTYPES)}")
        dtype = drafter_checkpoint.DTYPES[dtype]
    drafter = drafter_checkpoint.load(str(checkpoint), dtype, resolve_device(device))
    verifier_config = load_verifier_config(verifier or drafter.config.verifier, trust_remote_code)
    return SpeculativeModel(drafter, verifier_config, trust_remote_code)


def read(hidden_states: str | Path, num_rows: int, start: int = 0) -> Batch:
    """Read `num_rows` rows from the `start`-th on, with the states that `peagle extract` wrote, and pack them."""
    store = StoreReader.open(Path(hidden_states))
    return pack([store.read(row_id) for row_id in store.row_ids[start : start + num_rows]], None)
