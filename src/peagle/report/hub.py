"""`peagle push`: a checkpoint and its model card to the Hugging Face hub."""

import logging
import shutil
import tempfile
from pathlib import Path

from peagle.drafter.card import CARD, card, run_facts
from peagle.drafter.checkpoint import CONFIG, find, read_config, read_weights
from peagle.drafter.model_config import DrafterConfig
from peagle.errors import CheckpointError, ConfigError, one_line
from peagle.evaluate.counts import card_section
from peagle.files import whole_folder
from peagle.report.config import PushConfig
from peagle.report.data import EVALUATION, read_json

logger = logging.getLogger(__name__)


def push(config: PushConfig) -> None:
    """Check the checkpoint's files, write its card, upload.

    Raises:
        CheckpointError: the checkpoint is incomplete, or the hub refuses.
        ConfigError: the repository's name is not OWNER/NAME.
    """
    if config.repo.count("/") != 1 or not all(config.repo.split("/")):
        raise ConfigError(f"{config.repo}: expected OWNER/NAME")
    folder = find(config.checkpoint)
    if config.dry_run:
        if config.output.exists() and (not config.output.is_dir() or any(config.output.iterdir())):
            raise ConfigError(f"--output {config.output}: is there already and not empty; name a new folder")
        with whole_folder(config.output) as temporary:
            gather(folder, temporary, config.evaluation, config.license_name)
        logger.info("%s: this is what would be pushed to %s", config.output, config.repo)
        return
    with tempfile.TemporaryDirectory() as temporary:
        gather(folder, Path(temporary), config.evaluation, config.license_name)
        from huggingface_hub import HfApi

        api = HfApi()
        try:
            api.create_repo(config.repo, private=config.private, exist_ok=True)
            api.upload_folder(
                repo_id=config.repo, folder_path=temporary, commit_message=config.message, revision=config.revision
            )
        except Exception as error:  # the hub's many errors: no token, no right, no network
            hint = "`hf auth login` sets a token"
            raise CheckpointError(f"{config.repo}: the hub refused ({one_line(error)}); {hint}") from None
    logger.info("%s is at https://huggingface.co/%s", config.checkpoint, config.repo)


def gather(folder: Path, target: Path, evaluation: Path | None, license_name: str | None) -> None:
    """Copy what serving needs (never the training state) and write the card."""
    config = DrafterConfig.from_json(read_config(folder), str(folder / CONFIG))
    read_weights(folder)
    for file in (folder / CONFIG, *sorted(folder.glob("*.safetensors"))):
        shutil.copy2(file, target / file.name)
    found = find_evaluation(folder, evaluation)
    if found is None:
        logger.warning("no %s found for the card's table; `peagle evaluate` makes one", EVALUATION)
    text = card(config, run_facts(folder), card_section(found), license_name)
    (target / CARD).write_text(text, encoding="utf-8")


def find_evaluation(checkpoint: Path, given: Path | None) -> dict | None:
    """The evaluation for a card: the one given, else the one beside the checkpoint or in its run's folders."""
    if given is not None:
        path = given / EVALUATION if given.is_dir() else given
        if not path.is_file():
            raise ConfigError(f"--evaluation {given}: no such file")
        return read_json(path)
    run = checkpoint.resolve().parent
    for folder in (checkpoint, run, run / "evaluation", run.parent, run.parent / "evaluation"):
        if (folder / EVALUATION).is_file():
            return read_json(folder / EVALUATION)
    return None
