"""Steps through a Triton kernel line by line, on any machine: `python docs/step_through.py` beside kernels.py.

At pdb's prompt `n` runs a line, `p b_s` shows a value, `b 500` stops at a line of kernels.py, `c` goes on and `q` ends.
A sequence of 20 tokens lies in two blocks of 16. Its last token has 4 query heads, and two share each KV head.
"""

import dis
import os
import pdb
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
sys.path.insert(0, os.getcwd())
from config import lacking

if lack := lacking(("torch", "triton", "numpy")):
    sys.exit(lack)
import torch

import kernels

q, kv, table = torch.randn(1, 4, 32), torch.randn(3, 2, 2, 16, 32), torch.tensor([[2, 1]], dtype=torch.int32)
slots, seq_lens = torch.tensor([[0], [20]], dtype=torch.int32)
plan = kernels.plan_decode(kv, table, slots, seq_lens, num_heads=4, window=0)

debugger, code = pdb.Pdb(), kernels.attention_decode_kernel.fn.__code__
debugger.rcLines.append("continue")  # to where the kernel begins
debugger.set_break(code.co_filename, [line for _, line in dis.findlinestarts(code)][1], temporary=True)
try:
    debugger.runcall(kernels.attention_decode, q, kv, plan, scale=32**-0.5)
except Exception:
    if not debugger.quitting:
        raise
