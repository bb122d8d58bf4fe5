"""Settings of `peagle launch-vllm`; apart from its code, which takes seconds to load."""

from pathlib import Path

from pydantic import Field

from peagle.config import StageConfig


class LaunchConfig(StageConfig):
    """Start a vLLM server that hands out hidden states, for `peagle extract --endpoint`.

    vLLM's own flags follow `--`:

        peagle launch-vllm Qwen/Qwen3-8B --hidden-states-path /dev/shm/states -- --data-parallel-size 2 --port 8000

    The server listens on the loopback interface unless --host says otherwise. Ctrl-C stops it and all its processes.
    """

    model: str = Field(json_schema_extra={"positional": True})
    """The verifier: a model folder or a hub id."""
    hidden_states_path: Path
    """Folder through which the server hands hidden states over; the client must see the same folder. A memory disk
    such as /dev/shm is fastest; the output folder of `peagle extract` works too."""
    target_layer_ids: tuple[int, ...] = ()
    """Layers whose states a drafter reads; the default is 2, L // 2 and L - 3. The last layer is always added."""
    max_queued_bytes: int = Field(1 << 30, ge=1)
    """Hidden states that may wait for a slow disk, in host memory; the engine waits when it is full."""
    num_writer_threads: int = Field(2, ge=1)
    """Threads that write files, per engine."""
    vllm_python: Path | None = None
    """A Python that has vLLM, if this one has not."""
    ready_timeout_s: float = Field(1800, gt=0)
    """How long loading may take."""
    dry_run: bool = False
    """Print the command and stop."""
    extra_args: tuple[str, ...] = ()
    """What follows `--`: vLLM's own flags (--port, --tensor-parallel-size, --data-parallel-size ...)."""
