"""Everything that knows vLLM: its servers, its client, its counters, and the plugin that it loads.

In: rows or prompts, and a server's address or a model. Out: hidden states, answers, counters. Always: vLLM is imported
inside functions only; what a server answers is tied to the ids that it was sent; files are whole or absent.
Public: `launch.launch`, `client.Client`, `states.EndpointSource`, `inprocess.InProcessSource`, `answers`, `counters`.
"""
