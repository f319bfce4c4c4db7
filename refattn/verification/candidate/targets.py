"""Target strings: the function behind ``module:function``, ``file.py:function`` or ``model.onnx``."""

import importlib
import importlib.util
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from refattn.verification.candidate.adapter import Adapter
from refattn.verification.candidate.calls import Call, Outcome
from refattn.verification.candidate.independence import ImportWatch
from refattn.verification.errors import Unsupported, UsageError

__all__ = ["TARGET_FORMS", "load_adapter", "load_function"]


class _WatchedAdapter(Adapter):
    """The adapter of the child process, where every import of the candidate is watched."""

    watch: ImportWatch

    def invoke(self, call: Call) -> Outcome:
        outcome = super().invoke(call)
        if self.watch.seen:
            self.imports_refattn = True
        return outcome


def load_adapter(spec: Mapping[str, Any]) -> Adapter:
    """Load target strings in the child process: ``spec`` holds target, backward, folder and the words of the user.

    Raises
    ------
    UsageError
        A target does not load.
    """
    watch = ImportWatch()
    watch.install()
    sys.path.insert(0, spec["folder"])
    if spec["target"].endswith(".onnx"):
        function, backward = _onnx_function(Path(spec["target"]), spec["adapter"]), None
    else:
        function = load_function(spec["target"])
        backward = load_function(spec["backward"]) if spec["backward"] else None
    adapter = _WatchedAdapter(function, backward, name=spec["target"], imports_refattn=watch.seen, **spec["adapter"])
    adapter.watch = watch
    return adapter


def load_function(target: str) -> Callable[..., Any]:
    """The function behind ``package.module:function`` or ``path/file.py:function``.

    Raises
    ------
    UsageError
        The file, the module or the attribute does not exist, or the import fails.
    """
    place, _, attribute = target.rpartition(":")
    if not place or not attribute:
        raise UsageError(f"target {target!r}: {TARGET_FORMS}")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except UsageError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UsageError(
            f"target {target!r} does not load: {type(error).__name__}: {error}\n{traceback.format_exc()[-4000:]}"
        ) from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"target {target!r} does not load: {place} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"target {target!r} does not load: {attribute!r} is a {type(found).__name__}, not a function")
    return found


TARGET_FORMS = (
    "expected package.module:function, path/file.py:function, model.onnx, dump.safetensors"
    " or 'command:./program {inputs} {outputs}'"
)


def _load_file(path: Path) -> types.ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    for module in list(sys.modules.values()):
        origin = getattr(module, "__file__", None)
        if origin and module.__name__ == path.stem and Path(origin).resolve() == path:
            return module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"candidate_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_ONNX_TYPES = {
    "tensor(bool)": bool,
    "tensor(float16)": np.float16,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
}


def _onnx_function(path: Path, request: Mapping[str, Any]) -> Callable[..., Any]:
    """A model as a function whose signature names the model's inputs.

    The positional arrays of the mechanism are the inputs of the same names (any case; query, key, value count as q, k,
    v), else the first ones.  An input ``attn_mask`` takes ``mask`` if it is bool, else ``bias``.  Attributes are
    part of the model: options fixed by the user (``options=``) are taken as built in.
    """
    try:
        import onnxruntime
    except ImportError:
        raise UsageError(f"target {str(path)!r} needs onnxruntime, which is not installed") from None
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    try:
        session = onnxruntime.InferenceSession(str(path), providers=onnxruntime.get_available_providers())
    except Exception as error:
        raise UsageError(f"target {str(path)!r} does not load: {type(error).__name__}: {error}") from error
    inputs = {x.name: x for x in session.get_inputs()}
    positional = list(request["positional"])
    long = {"query": "q", "key": "k", "value": "v"}
    ours = {long.get(name.lower(), name.lower()): name for name in inputs}
    arrays = [ours[n] for n in positional] if all(n in ours for n in positional) else list(inputs)[: len(positional)]
    options = [n for n in inputs if n not in arrays]
    masked = {n: "mask" if inputs[n].type == "tensor(bool)" else "bias" for n in options if n == "attn_mask"}
    results = [x.name for x in session.get_outputs()]

    def run(*given: Any, **more: Any) -> Any:
        theirs = {our: their for their, our in masked.items()}
        feed = {**dict(zip(arrays, given, strict=True)), **{theirs.get(n, n): np.asarray(x) for n, x in more.items()}}
        for name in masked:
            pairs = (given[0].shape[-2], given[1].shape[-2])
            if name not in feed:  # an input cannot be left out: a mask that hides nothing, a bias of zeros
                hides = inputs[name].type == "tensor(bool)"
                feed[name] = np.ones(pairs, dtype=bool) if hides else np.zeros(pairs, dtype=given[0].dtype)
            x = feed[name]
            feed[name] = np.broadcast_to(x, (*(1,) * (len(inputs[name].shape) - x.ndim), *x.shape[:-2], *pairs))
        for name, x in inputs.items():
            if name not in feed:
                raise Unsupported(f"the model wants its input {name}")
            want = _ONNX_TYPES.get(x.type)
            if want is not None and feed[name].dtype != want:
                raise Unsupported(f"the model's input {name} is {x.type}, not {feed[name].dtype}")
        made = session.run(None, {n: np.ascontiguousarray(x) for n, x in feed.items()})
        named = dict(zip(results, made, strict=True))
        return {"output": made[0], **{n: x for n, x in named.items() if n == "lse"}}

    kind = inspect.Parameter
    parameters = [kind(n, kind.POSITIONAL_ONLY) for n in positional]
    parameters += [kind(masked.get(n, n), kind.KEYWORD_ONLY, default=None) for n in options]  # run says what is missing
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
