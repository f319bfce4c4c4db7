"""The implementation under test: how it is found, what its signature takes, and one way of calling all of them.

A candidate is a callable (runs in this process) or a *target string* (runs in a child process, see ``process``):

======================================  ======================================================================
``package.module:function``             imported; the current folder is on the path
``path/file.py:function``               loaded from the file; its folder is on the path
``model.onnx``                          run by onnxruntime; arrays and options are matched to its inputs by name
``command:./program {inputs} {outputs}``  any program, any language: the exchange format below
``dump.safetensors``                    a recorded call: inputs and outputs of one call made elsewhere
======================================  ======================================================================

**Exchange format** (``command:`` and recorded calls).  ``{inputs}`` is a safetensors file with the arrays by name (q, k,
v, mask, bias ... as far as the probe uses them) and, when gradients are wanted, the cotangents ``d_output`` and
``d_lse``.  Its metadata holds ``mechanism``, ``options`` (the other options, a JSON object; tuples are JSON lists) and
``wrt`` (a JSON list: the arguments whose gradients are wanted).  The program writes ``{outputs}``: ``output``, further
results by name (``lse`` ...), gradients as ``d_q``, ``d_k`` ...; gradients it leaves out are "not provided".  To say that
it cannot take the options it writes a file without arrays and with the metadata entry ``unsupported`` = the reason.  Exit
status 0 is success, another one is a failed probe, death by a signal (or a status of 128 and more) is a crash.  A recorded
call is the two files in one: inputs, cotangents, outputs and gradients together, options in the metadata.
"""

from refattn.verification.candidate.adapter import Adapter
from refattn.verification.candidate.calls import Call, Outcome
from refattn.verification.candidate.opening import Abilities, Candidate, Patience, open_candidate
from refattn.verification.errors import Unsupported, UsageError

__all__ = [
    "Abilities",
    "Adapter",
    "Call",
    "Candidate",
    "Outcome",
    "Patience",
    "Unsupported",
    "UsageError",
    "open_candidate",
]
