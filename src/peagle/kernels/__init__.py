"""What a step spends its time on besides matrix products: tensors in, tensors out, autograd goes through.

Each function stands beside its definition in PyTorch, which it equals but for rounding; threads change no bit of it.
Nobody outside asks what the processor can do: attention in C is chosen by its name (`native_attention_problem` says
once why it cannot be), and the loss's functions choose by themselves; on a GPU the loss is one Triton kernel, unless
`fused_loss_problem` says why not.
Public: `cpu`, `gpu`.
"""
