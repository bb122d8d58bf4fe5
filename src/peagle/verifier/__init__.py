"""The frozen model: a folder or hub id comes in; its configuration, head, embedding, hidden states and answers go out.

States before the final norm are called `last_states`; the norm is applied exactly once, by `VerifierHead`. Nothing here
trains or imports vLLM. Public: `model_config.load_verifier_config` and `resolve_aux_layer_ids`, `weights.load_head`,
`load_embedding` and `fingerprint`, `special_tokens`, the records and protocols of `source` (what runs a verifier, here
or elsewhere, gives states and answers through them), and `local.TransformersVerifier` and `TransformersSource`.
"""
