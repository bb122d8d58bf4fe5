"""What vLLM itself loads: a folder that goes on the server's PYTHONPATH, alone.

In: nothing of `peagle`. Both modules import torch, safetensors and (the connector) vLLM only, so a server needs just
this folder, not the package, and runs the same whether or not the package is installed beside it.
"""
