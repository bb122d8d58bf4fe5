"""`peagle launch-vllm`."""

from peagle.verifier.vllm_launch_config import LaunchConfig

CONFIG = LaunchConfig


def run(config: LaunchConfig) -> int:
    """Start a vLLM server that hands out hidden states, for `peagle extract --endpoint`.

    vLLM's own flags follow `--`:

        peagle launch-vllm Qwen/Qwen3-8B --hidden-states-path /dev/shm/states -- --data-parallel-size 2 --port 8000

    The server listens on the loopback interface unless --host says otherwise. Ctrl-C stops it and all its processes.
    """
    from peagle.verifier.vllm_launch import launch

    return launch(config)
