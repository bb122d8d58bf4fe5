"""The frozen model: a folder or hub id comes in; its verifier_config, head, embedding, hidden states and answers go out.

States before the final norm are called `last_states`; the norm is applied exactly once, by `VerifierHead`. Nothing here
trains, and only `vllm*.py` may import vLLM, inside functions. Public: `verifier_config.load_verifier_config`, `weights.load_head`,
`weights.load_embedding`, `layers.resolve_aux_layer_ids`, `mask_token.resolve_mask_token`, `tokenizer.load_tokenizer`,
`source.StateSource`, `transformers.TransformersVerifier`, `regenerate.regenerate`.
"""
