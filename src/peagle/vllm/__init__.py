"""Everything that knows vLLM: its servers and their client, its counters, and the plugin that it loads.

In: rows or prompts, and a server's address or a model. Out: hidden states, answers, counters. Always: vLLM is imported
inside functions only (vLLM loads the plugin itself); what comes back is tied to the ids that were sent; files are
whole or absent. Public: `launch.launch`, `client.Endpoint` and `EndpointPool`, `states.EndpointSource`,
`inprocess.InProcessSource`, `answers.EndpointAnswers`, `counters`.
"""
