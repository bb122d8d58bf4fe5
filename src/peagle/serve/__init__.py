"""Checkpoints as a serving engine takes them: a check that is an independent witness, and `vllm serve`.

In: a checkpoint folder or hub id. Out: findings, a running server. The check reads the files itself (JSON and
safetensors, never the network of `drafter/`), so that it catches what our own writer and reader would both get wrong;
it knows what vLLM refuses, and, worse, what it misreads without a word. Public: `config.CheckConfig`,
`check.check_checkpoint`, `config.ServeConfig`, `launch.serve`.
"""
