"""The network, its `config.json`, and checkpoints in the format that vLLM loads.

In: a verifier's configuration and states. Out: states that the head reads, and checkpoint folders. Always: the state
dict's names are the checkpoint's, loading is strict, and one pass serves training, the engine and (as an oracle) vLLM.
Public: `network.Drafter`, `model_config.DrafterConfig` and `config_for`, `checkpoint.load` and `save`.
"""
