"""`peagle serve`."""

from peagle.serve.config import ServeConfig

CONFIG = ServeConfig


def run(config: ServeConfig) -> int:
    """Serve a drafter with its verifier: check the checkpoint, then become `vllm serve`.

    vLLM's own flags follow `--`:

        peagle serve runs/checkpoints/checkpoint_best -- --port 8000 --max-model-len 4096

    The server listens on the loopback interface unless --host says otherwise. `vllm serve CHECKPOINT` works too.
    """
    from peagle.serve.launch import serve

    return serve(config)
